"""A constraint on its way to a matcher."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from dovetail.constraints.cache import Compiled, Outcome, Refused
from dovetail.errors import GrammarError, QueueFullError

if TYPE_CHECKING:
    from dovetail.interfaces.grammar import Matcher
    from dovetail.sampling_params import GrammarSpec

PATIENCE = 6
"""How many time limits a constraint waits for its turn."""


class CompileJob:
    """One compilation, which any number of tickets wait for. Thread-safe.

    It is also the ``CompileWatch`` of a compilation on a thread, which cannot be ended: past ``deadline`` nobody waits for it.
    """

    def __init__(self, spec: GrammarSpec, seconds: float, outcome: Outcome | None = None) -> None:
        """``seconds`` is the time limit; ``outcome`` is set where there is nothing to do."""
        self.spec = spec
        self.seconds = seconds
        self.outcome = outcome
        self.error: Exception | None = None  # what broke, where the constraint was not judged
        self.started = outcome is not None
        self.deadline: float | None = None
        self._waiting = 0
        self._closed = False
        self._lock = threading.Lock()

    def join(self) -> None:
        """One more waits."""
        with self._lock:
            self._waiting += 1

    def leave(self) -> None:
        """One fewer waits."""
        with self._lock:
            self._waiting -= 1

    def close(self) -> None:
        """Nobody waits for it from now on."""
        self._closed = True

    @property
    def wanted(self) -> bool:
        """True while a ticket waits."""
        return self._waiting > 0 and not self._closed

    @property
    def done(self) -> bool:
        """True once there is an answer, or there will be none."""
        return self.outcome is not None or self.error is not None or self._closed

    @property
    def overdue(self) -> bool:
        """True if it is past its deadline."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def building(self) -> None:
        """See ``CompileWatch``."""
        self.deadline = None

    def compiling(self) -> None:
        """See ``CompileWatch``."""
        if self.deadline is None:
            self.deadline = time.monotonic() + self.seconds


def too_slow(spec: GrammarSpec, seconds: float) -> GrammarError:
    """What to tell a client whose constraint takes too long."""
    return GrammarError(f"the {spec.kind} took longer than {seconds:g} s to compile; make it smaller", param=spec.kind)


class GrammarTicket:
    """A constraint on its way to a matcher. ``ready`` and ``matcher`` never block."""

    def __init__(self, job: CompileJob) -> None:
        self._job = job
        self._kind = job.spec.kind
        self._patience = time.monotonic() + PATIENCE * job.seconds
        self._cancelled = False

    @property
    def ready(self) -> bool:
        """True once ``matcher`` has an answer: compiled, refused, timed out or cancelled."""
        return self._cancelled or self._job.done or self._job.overdue or self._out_of_patience

    @property
    def _out_of_patience(self) -> bool:
        return not self._job.started and time.monotonic() >= self._patience

    @property
    def spec(self) -> GrammarSpec:
        """The constraint."""
        return self._job.spec

    @property
    def backend(self) -> str:
        """The name of the grammar backend that compiled it; only after ``matcher``."""
        assert isinstance(self._job.outcome, Compiled)
        return self._job.outcome.backend

    def matcher(self) -> Matcher:
        """A fresh matcher of this ticket's own; only if ``ready``. Raises ``GrammarError``, ``QueueFullError`` if it has not
        had its turn for too long, and what a broken backend raised."""
        outcome = self._job.outcome
        if isinstance(outcome, Compiled) and not self._cancelled:
            return outcome.grammar.matcher()
        if isinstance(outcome, Refused) and not self._cancelled:
            raise outcome.error.with_traceback(None)  # raised once for each request: it would grow
        if self._job.error is not None and not self._cancelled:
            raise self._job.error
        raise self._given_up()

    def _given_up(self) -> GrammarError | QueueFullError:
        if self._cancelled or self._job.done:
            return GrammarError(f"the {self._kind} was cancelled before it was compiled", param=self._kind)
        assert self._job.overdue or self._out_of_patience, "ask `ready` first"
        overdue = self._job.overdue
        self.cancel()
        if overdue:
            return too_slow(self._job.spec, self._job.seconds)
        waited = PATIENCE * self._job.seconds
        return QueueFullError(f"the {self._kind} waited {waited:g} s for others to be compiled; retry later")

    def cancel(self) -> None:
        """Give the ticket up. A compilation that nobody waits for any more is not started, or ended."""
        if not self._cancelled:
            self._cancelled = True
            self._job.leave()
