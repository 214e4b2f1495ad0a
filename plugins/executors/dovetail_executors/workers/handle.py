"""Start the process of a rank, and hold it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import msgspec

from dovetail_executors.workers.memory import AnonymousMemory
from dovetail_executors.workers.rank_process import RankSpec
from dovetail_executors.workers.ring import RingReader

_START = (
    "import json, os, sys; sys.path[:] = json.loads(os.environ.pop('DOVETAIL_RANK_PATH')); "
    "from dovetail_executors.workers.rank_process import main; main(int(sys.argv[1]))"
)


class RankHandle:
    """Hold the process of one rank, the pipes to it, and its replies."""

    def __init__(self, rank: int, wake_fd: int, reply_fd: int, memory: AnonymousMemory) -> None:
        self.rank, self.wake_fd, self.reply_fd, self.memory = rank, wake_fd, reply_fd, memory
        self.replies = RingReader(memory)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Return the process id."""
        assert self.process is not None
        return self.process.pid

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"

    def end_of(self) -> str | None:
        """Return how the process has ended, or None if it runs."""
        code = None if self.process is None else self.process.poll()
        if code is None:
            return None
        if code >= 0:
            return f"{self} has exited with code {code}; its log says why"
        name = signal.Signals(-code).name
        why = "; Linux does this to a process when memory is short (see dmesg)" if -code == signal.SIGKILL else ""
        return f"{self} was ended by signal {-code} ({name}){why}"


def spawn(spec: RankSpec) -> subprocess.Popen[bytes]:
    """Start the process of a rank. It inherits only the descriptors of ``spec``."""
    data = msgspec.msgpack.encode(spec)
    memory = AnonymousMemory.create(len(data))
    try:
        memory.view[:] = data
        memories = (spec.messages[0], spec.replies[0], spec.masks[0])
        path = json.dumps([os.path.abspath(entry) for entry in sys.path])
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _START, str(memory.fd)],  # -P: _START imports nothing from this directory
            pass_fds=(memory.fd, spec.life_fd, spec.inbox_fd, spec.outbox_fd, *memories),
            env={**os.environ, "DOVETAIL_RANK_PATH": path},
            stdin=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C in a terminal reaches this process, which decides
        )
    finally:
        memory.close()
