"""Run the worker processes that compile constraints, from the engine's side. A constraint that takes too much time or
memory ends its worker process and nothing else."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from dovetail.constraints import worker

if TYPE_CHECKING:
    from dovetail.sampling_params import GrammarSpec

BUILD_SECONDS = 120.0
"""Limit the time, in seconds, to start a process, and to import each backend."""
GRACE_SECONDS = 1.0
"""Continue a compilation for this number of seconds after the last request has stopped waiting for it. Most
compilations end within that time, and no other process has to be started."""
STALL_SECONDS = 3.0
"""Kill a process that has been stopped (SIGSTOP) for this number of seconds while a request waits for it."""
_TICK_SECONDS = 0.02
_SENT_BY_OTHERS = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGSTOP}
)
"""List the signals that come from outside of the process. They never mean that a limit was exceeded: a process that
exceeds its processor time gets SIGXCPU, and a process that exceeds its memory ends with an error or SIGABRT."""
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from dovetail.constraints.worker import main; main(int(sys.argv[1]))"
)


class Abandoned(Exception):
    """Raised when no request waits for the constraint any more."""


class Ended(Exception):
    """Raised when the process has ended before it answered.

    ``compiling`` is true if it ended while it read the constraint, ``killed`` if it was killed or stopped from outside (by
    an operator, or by the system when it ran out of memory), ``overtime`` if it exceeded its limit of processor time.
    """

    def __init__(self, code: int, compiling: bool) -> None:
        super().__init__(f"signal {-code}" if code < 0 else f"exit code {code}")
        self.compiling = compiling
        self.killed = -code in _SENT_BY_OTHERS
        self.overtime = -code == signal.SIGXCPU


class TimedOut(Exception):
    """Raised when the process was killed because it took too long; ``building`` is true if it was building a
    backend."""

    def __init__(self, building: bool) -> None:
        super().__init__()
        self.building = building


class WorkerProcess:
    """Run one process that compiles. One thread uses it at a time. The process ends when this object is
    garbage-collected, and when the engine process ends."""

    def __init__(self, setup: worker.Setup, stall_seconds: float = STALL_SECONDS) -> None:
        self._setup: worker.Setup | None = setup
        self._stall_seconds = stall_seconds
        self._stopped: float | None = None
        self._conn, theirs = multiprocessing.Pipe()
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, str(theirs.fileno()), json.dumps(sys.path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=env,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C goes to the engine alone, which then ends its workers
        )
        theirs.close()
        self._end = weakref.finalize(self, _end, self._process, self._conn)

    def compile(self, spec: GrammarSpec, seconds: float, is_awaited: Callable[[], bool]) -> worker.Event:
        """Compile ``spec`` within ``seconds`` and return the answer. ``is_awaited`` returns False once no request waits
        for the constraint any more. Raises ``Ended``, ``TimedOut`` or ``Abandoned``; the process has then ended."""
        clock = _Clock(seconds)
        try:
            self.prepare(())
            self._conn.send(spec)
            return self._answer(clock, is_awaited)
        except (EOFError, OSError):
            raise Ended(self._reap(), not clock.building) from None
        except BaseException:
            self.kill()
            raise

    def prepare(self, names: Sequence[str]) -> None:
        """Send its setup to a new process, which then builds the backends ``names``. Does nothing for a process that
        has its setup. Raises ``OSError`` if the process has ended."""
        if self._setup is not None:
            self._conn.send((self._setup, tuple(names)))
            self._setup = None

    def _answer(self, clock: _Clock, is_awaited: Callable[[], bool]) -> worker.Event:
        start = time.monotonic()
        while True:
            if self._conn.poll(_TICK_SECONDS):
                event = self._conn.recv()
                if isinstance(event, worker.Done | worker.GrammarRefused | worker.CompileFailed):
                    return event
                clock.take(event)
            elif self._stopped_for() > self._stall_seconds:
                raise Ended(-signal.SIGSTOP, not clock.building)
            elif clock.over:
                raise TimedOut(clock.building)
            elif not is_awaited() and time.monotonic() - start > GRACE_SECONDS:
                raise Abandoned

    def _stopped_for(self) -> float:
        """Return the number of seconds since this process was first seen to be stopped; 0 if it is not."""
        now = time.monotonic()
        self._stopped = (self._stopped or now) if _is_stopped(self._process.pid) else None
        return 0.0 if self._stopped is None else now - self._stopped

    def _reap(self) -> int:
        """Return the exit code of a process whose pipe is closed."""
        try:
            return self._process.wait(5)
        except subprocess.TimeoutExpired:
            return -9
        finally:
            self._end()

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    def kill(self) -> None:
        """Kill the process now."""
        self._end()


class _Clock:
    """Measure the time that one constraint has left. The clock stops while a backend is built."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self.building = True
        self._deadline = time.monotonic() + BUILD_SECONDS

    def take(self, event: worker.Event) -> None:
        now = time.monotonic()
        if isinstance(event, worker.BuildStarted) and not self.building:
            self._left = self._deadline - now
            self._deadline = now + BUILD_SECONDS
            self.building = True
        elif isinstance(event, worker.CompileStarted) and self.building:
            self._deadline = now + self._left
            self.building = False

    @property
    def over(self) -> bool:
        return time.monotonic() > self._deadline


def _is_stopped(pid: int) -> bool:
    """Return True if the process was stopped, as far as the system can say."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False


def _end(process: subprocess.Popen[bytes], conn: Connection) -> None:
    conn.close()
    process.kill()
    process.wait()
