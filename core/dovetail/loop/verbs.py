"""Schedule, launch and commit the steps of a loop, and measure how long each of these parts takes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from dovetail.engine.engine import Engine
    from dovetail.engine.runners import Launched
    from dovetail.loop.drafter_guard import DrafterGuard
    from dovetail.loop.failures import FailureHandler
    from dovetail.messages import Answer
    from dovetail.scheduler.scheduler import Scheduler
    from dovetail.types import Batch, ForwardOutput

IDLE_SECONDS = 0.0005
"""The seconds to pause when requests wait for their grammars and nothing else can run."""


class InFlight(NamedTuple):
    """Hold a step that was launched and is not committed. If ``drafted``, the drafter observes the step when it is
    committed."""

    batch: Batch
    output: ForwardOutput
    drafted: bool = False


class Failure(NamedTuple):
    """Hold what the engine raised in a step. The step's requests are ended once the step before it is committed."""

    error: BaseException


@dataclass(slots=True)
class StepTimes:
    """Count steps, and the seconds that the parts of all steps have taken since the start.

    ``step`` is the time of whole steps. ``launch`` includes sampling, and ``draft`` includes the drafter's observation
    of results. ``verify`` is the part of ``launch`` and ``wait`` that was spent in steps with drafts.
    """

    steps: int = 0
    step: float = 0.0
    schedule: float = 0.0
    draft: float = 0.0
    launch: float = 0.0
    wait: float = 0.0
    verify: float = 0.0
    commit: float = 0.0


class Verbs:
    """Schedule, launch and commit steps of one scheduler on one engine."""

    def __init__(self, scheduler: Scheduler, engine: Engine, failures: FailureHandler) -> None:
        self.times = StepTimes()
        self.scheduler = scheduler
        self._engine, self._failures = engine, failures

    def schedule(self, *, pause: bool = True) -> Batch | None:
        """Return the next step's batch, or None if nothing can run. If nothing can run but requests wait, pause for
        ``IDLE_SECONDS`` first, unless ``pause`` is False."""
        start = time.perf_counter()
        batch = self.scheduler.schedule()
        self.times.schedule += time.perf_counter() - start
        if batch is not None:
            self.times.steps += 1
        elif pause and self.scheduler.has_work:
            time.sleep(IDLE_SECONDS)
        return batch

    def forward(self, batch: Batch) -> ForwardOutput | Failure:
        """Launch the forward pass of a step and sample from it."""
        start = time.perf_counter()
        try:
            return self._engine.forward(batch)
        except BaseException as error:
            self.scheduler.take_back(batch)
            return Failure(error)
        finally:
            self.times.launch += time.perf_counter() - start

    def launch(self, batch: Batch) -> Launched[Any] | Failure:
        """Launch the forward pass of a step. The caller must call ``sample`` next."""
        start = time.perf_counter()
        try:
            return self._engine.launch(batch)
        except BaseException as error:
            self.scheduler.take_back(batch)
            return Failure(error)
        finally:
            self.times.launch += time.perf_counter() - start

    def sample(self, batch: Batch, launched: Launched[Any]) -> ForwardOutput | Failure:
        """Sample from the step that was launched last."""
        start = time.perf_counter()
        try:
            return self._engine.sample(batch, launched)
        except BaseException as error:
            return Failure(error)
        finally:
            self.times.launch += time.perf_counter() - start

    def commit(self, step: InFlight, observer: DrafterGuard | None = None) -> list[Answer]:
        """Wait for the tokens of a step and give them to its requests. If ``observer`` is given, it observes what the
        step accepted."""
        start = time.perf_counter()
        try:
            host = self._engine.wait(step.batch, step.output)
        except BaseException as error:
            return self._failures.fail_step(step.batch, error)
        finally:
            waited = time.perf_counter()
            self.times.wait += waited - start
        answers = self.scheduler.commit(step.batch, host)
        committed = time.perf_counter()
        self.times.commit += committed - waited
        if observer is not None:
            observer.observe(step.batch, step.output)
            self.times.draft += time.perf_counter() - committed
        return answers

    def fail(self, batch: Batch, failure: Failure) -> list[Answer]:
        """End the requests of a step that failed. The step before it must have been committed."""
        return self._failures.fail_step(batch, failure.error)

    def reserve_ahead(self) -> None:
        """Reserve pages for the drafts of the next step while the device computes this one, so that this work does not
        delay the next step."""
        self._engine.locate_updates(self.scheduler.reserve_ahead())
