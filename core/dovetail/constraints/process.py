"""Compiling in processes: a constraint that takes too long or too much ends its process, and nothing else."""

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
"""Time limit of a process's start and of each backend's imports."""
GRACE_SECONDS = 1.0
"""A compilation that nobody waits for any more goes on for so long: most end, and another process need not be started."""
_TICK_SECONDS = 0.02
_SENT_BY_OTHERS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
"""Signals that neither a crash nor a limit of the process itself brings: its processor time ends with SIGXCPU, its memory with an
error or SIGABRT."""
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from dovetail.constraints.worker import main; main(int(sys.argv[1]))"
)


class Abandoned(Exception):
    """Nobody waits for the grammar any more."""


class Ended(Exception):
    """The process has ended before it answered; ``compiling``: while it read the constraint. ``killed``: by somebody else,
    an operator or the system when it ran out of memory. ``overtime``: by its limit of processor time."""

    def __init__(self, code: int, compiling: bool) -> None:
        super().__init__(f"signal {-code}" if code < 0 else f"exit code {code}")
        self.compiling = compiling
        self.killed = -code in _SENT_BY_OTHERS
        self.overtime = -code == signal.SIGXCPU


class TimedOut(Exception):
    """The process was ended, as it took too long; ``building``: to build a backend."""

    def __init__(self, building: bool) -> None:
        super().__init__()
        self.building = building


class WorkerProcess:
    """One process that compiles. Used by one thread at a time; ends when it is collected, or when this process does."""

    def __init__(self, setup: worker.Setup) -> None:
        self._setup: worker.Setup | None = setup
        self._conn, theirs = multiprocessing.Pipe()
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, str(theirs.fileno()), json.dumps(sys.path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=env,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # an interrupt at the terminal is for the engine, which then ends its workers
        )
        theirs.close()
        self._end = weakref.finalize(self, _end, self._process, self._conn)

    def ask(self, spec: GrammarSpec, seconds: float, wanted: Callable[[], bool]) -> worker.Event:
        """The answer to ``spec``. Raises ``Ended``, ``TimedOut`` or ``Abandoned``; the process has then ended."""
        clock = _Clock(seconds)
        try:
            self.prepare(())
            self._conn.send(spec)
            return self._answer(clock, wanted)
        except (EOFError, OSError):
            raise Ended(self._reap(), not clock.building) from None
        except BaseException:
            self.kill()
            raise

    def prepare(self, names: Sequence[str]) -> None:
        """Tell a fresh process what it is for, and to build the backends of these names. Raises ``OSError`` if it has
        ended."""
        if self._setup is not None:
            self._conn.send((self._setup, tuple(names)))
            self._setup = None

    def _answer(self, clock: _Clock, wanted: Callable[[], bool]) -> worker.Event:
        start = time.monotonic()
        while True:
            if self._conn.poll(_TICK_SECONDS):
                event = self._conn.recv()
                if isinstance(event, worker.Done | worker.GrammarRefused | worker.CompileFailed):
                    return event
                clock.take(event)
            elif clock.over:
                raise TimedOut(clock.building)
            elif not wanted() and time.monotonic() - start > GRACE_SECONDS:
                raise Abandoned

    def _reap(self) -> int:
        """The exit code of a process whose pipe is closed."""
        try:
            return self._process.wait(5)
        except subprocess.TimeoutExpired:
            return -9
        finally:
            self._end()

    @property
    def pid(self) -> int:
        """Its id."""
        return self._process.pid

    def kill(self) -> None:
        """End it now."""
        self._end()


class _Clock:
    """The time limit of one constraint, which stands still while a backend is built."""

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


def _end(process: subprocess.Popen[bytes], conn: Connection) -> None:
    conn.close()
    process.kill()
    process.wait()
