"""Start the processes of ranks that need not import torch again: each is forked from a process that has imported the heavy packages,
as engines of tests are (``fresh.heavy_imported``). Tests of the executor itself start ranks as it does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection

import msgspec
import pytest

from dovetail_executors.workers import group
from dovetail_executors.workers.memory import AnonymousMemory
from dovetail_executors.workers.rank_process import RankSpec, main
from fresh import heavy_imported


def fork_ranks(patch: pytest.MonkeyPatch) -> None:
    """Let executors of this process fork their ranks until ``patch`` is undone."""
    patch.setattr(group, "spawn", ForkedRank)


class ForkedRank:
    """Stand in for the ``subprocess.Popen`` of a rank, which inherits the descriptors of ``spec``."""

    def __init__(self, spec: RankSpec) -> None:
        inherited = [spec.life_fd, spec.inbox_fd, spec.outbox_fd, spec.messages[0], spec.replies[0], spec.masks[0]]
        sent = [Connection(os.dup(number)) for number in (*inherited, 1, 2)]  # multiprocessing sends connections
        path = [os.path.abspath(entry) for entry in sys.path]
        given = msgspec.msgpack.encode(spec), sent, dict(os.environ), path
        self._process = heavy_imported().Process(target=_run_rank, args=given, daemon=True)
        self._process.start()
        for connection in sent:
            connection.close()

    @property
    def pid(self) -> int:
        """Return the process id."""
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Return how it has ended, as ``Popen.poll``, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises ``subprocess.TimeoutExpired`` after ``timeout`` seconds."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return code

    def kill(self) -> None:
        """End it now."""
        self._process.kill()


def _run_rank(data: bytes, received: Sequence[Connection], env: Mapping[str, str], path: list[str]) -> None:
    os.setpgrp()
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = path
    life, inbox, outbox, messages, replies, masks, *streams = [connection.fileno() for connection in received]
    for number, stream in enumerate((os.open(os.devnull, os.O_RDONLY), *streams)):
        os.dup2(stream, number)
    spec = msgspec.msgpack.decode(data, type=RankSpec)
    spec.life_fd, spec.inbox_fd, spec.outbox_fd, spec.parent = life, inbox, outbox, os.getppid()
    spec.messages, spec.replies, spec.masks = (
        (number, size)
        for number, (_, size) in zip((messages, replies, masks), (spec.messages, spec.replies, spec.masks), strict=True)
    )
    data = msgspec.msgpack.encode(spec)
    memory = AnonymousMemory.create(len(data))
    memory.view[:] = data
    main(os.dup(memory.fd))
