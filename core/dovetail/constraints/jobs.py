"""Track the compilation of a constraint, and the requests that wait for it."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from dovetail.constraints.cache import Compiled, Outcome, Refused
from dovetail.errors import GrammarError, QueueFullError

if TYPE_CHECKING:
    from dovetail.interfaces.grammar import Matcher
    from dovetail.sampling_params import GrammarSpec

MAX_WAIT = 6
"""Limit the time for which a constraint waits for a free compiler thread, in multiples of the time limit of its
compilation."""


class CompileJob:
    """Hold the state of one compilation. Any number of tickets may wait for it. Thread-safe.

    A job is also the ``CompileWatch`` of a compilation on a thread. Such a compilation cannot be stopped, but its
    tickets stop waiting once ``deadline`` has passed.
    """

    def __init__(self, spec: GrammarSpec, seconds: float, outcome: Outcome | None = None) -> None:
        """Create a job for ``spec`` with a time limit of ``seconds``. ``outcome`` is given if the constraint need not
        be compiled."""
        self.spec = spec
        self.seconds = seconds
        self.outcome = outcome
        self.error: Exception | None = None  # the failure, if it does not come from the constraint
        self.started = outcome is not None
        self.deadline: float | None = None
        self._waiting = 0
        self._closed = False
        self._lock = threading.Lock()

    def join(self) -> None:
        """Count one more waiting ticket."""
        with self._lock:
            self._waiting += 1

    def leave(self) -> None:
        """Count one fewer waiting ticket."""
        with self._lock:
            self._waiting -= 1

    def close(self) -> None:
        """End the job without an outcome; no ticket waits for it from now on."""
        self._closed = True

    @property
    def is_awaited(self) -> bool:
        """Return True while a ticket waits for the job."""
        return self._waiting > 0 and not self._closed

    @property
    def done(self) -> bool:
        """Return True once there is an outcome or an error, or the job was closed."""
        return self.outcome is not None or self.error is not None or self._closed

    @property
    def overdue(self) -> bool:
        """Return True if the deadline has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def building(self) -> None:
        """See ``CompileWatch``."""
        self.deadline = None

    def compiling(self) -> None:
        """See ``CompileWatch``."""
        if self.deadline is None:
            self.deadline = time.monotonic() + self.seconds


def too_slow(spec: GrammarSpec, seconds: float) -> GrammarError:
    """Return the error for a client whose constraint takes too long to compile."""
    return GrammarError(f"the {spec.kind} took longer than {seconds:g} s to compile; make it smaller", param=spec.kind)


class GrammarTicket:
    """Represent one request that waits for its constraint to be compiled. ``ready`` and ``matcher`` never block."""

    def __init__(self, job: CompileJob) -> None:
        self._job = job
        self._kind = job.spec.kind
        self._wait_until = time.monotonic() + MAX_WAIT * job.seconds
        self._cancelled = False

    @property
    def ready(self) -> bool:
        """Return True once ``matcher`` may be called: the constraint was compiled or refused, its time limit has
        passed, or the ticket was cancelled."""
        return self._cancelled or self._job.done or self._job.overdue or self._waited_too_long

    @property
    def _waited_too_long(self) -> bool:
        return not self._job.started and time.monotonic() >= self._wait_until

    @property
    def spec(self) -> GrammarSpec:
        """Return the constraint."""
        return self._job.spec

    @property
    def backend(self) -> str:
        """Return the name of the grammar backend that compiled the constraint. May be read only after ``matcher`` has
        returned."""
        assert isinstance(self._job.outcome, Compiled)
        return self._job.outcome.backend

    def matcher(self) -> Matcher:
        """Return a new matcher. May be called only if ``ready``. Raises ``GrammarError`` if the constraint was refused,
        timed out or cancelled, ``QueueFullError`` if no compiler thread was free in time, and any exception of a broken
        backend."""
        outcome = self._job.outcome
        if isinstance(outcome, Compiled) and not self._cancelled:
            return outcome.grammar.matcher()
        if isinstance(outcome, Refused) and not self._cancelled:
            raise outcome.error.with_traceback(None)  # without the traceback, which would grow each time
        if self._job.error is not None and not self._cancelled:
            raise self._job.error
        raise self._abandoned()

    def _abandoned(self) -> GrammarError | QueueFullError:
        if self._cancelled or self._job.done:
            return GrammarError(f"the {self._kind} was cancelled before it was compiled", param=self._kind)
        assert self._job.overdue or self._waited_too_long, "`matcher` was called before the ticket was ready"
        overdue = self._job.overdue
        self.cancel()
        if overdue:
            return too_slow(self._job.spec, self._job.seconds)
        waited = MAX_WAIT * self._job.seconds
        return QueueFullError(f"the {self._kind} waited {waited:g} s for a free compiler thread; retry later")

    def cancel(self) -> None:
        """Stop waiting. If no ticket waits for a compilation any more, it is not started, or it is stopped if it runs
        in a worker process."""
        if not self._cancelled:
            self._cancelled = True
            self._job.leave()
