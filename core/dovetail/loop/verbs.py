"""Schedule, launch and commit the steps of a loop, and measure how long each of these parts takes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dovetail.interfaces.executor import StepVerbs
    from dovetail.loop.drafter_guard import DrafterGuard
    from dovetail.loop.failures import FailureHandler
    from dovetail.messages import Answer
    from dovetail.scheduler.scheduler import Scheduler
    from dovetail.types import StepPlan

IDLE_SECONDS = 0.0005
"""The seconds to pause when requests wait for their grammars and nothing else can run."""


class InFlight(NamedTuple):
    """Hold a step that was launched and is not committed. If ``drafted``, the drafter observes the step when it is
    committed."""

    plan: StepPlan
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
    """Schedule, launch and commit steps of one scheduler on one executor. While ``paused`` is set, nothing is
    scheduled."""

    def __init__(
        self, scheduler: Scheduler, executor: StepVerbs, failures: FailureHandler, guard: DrafterGuard
    ) -> None:
        self.times = StepTimes()
        self.paused = False
        self.scheduler = scheduler
        self._executor, self._failures, self._guard = executor, failures, guard

    def schedule(self, *, pause: bool = True) -> StepPlan | None:
        """Return the next step's plan, or None if nothing can run. If nothing can run but requests wait, pause for
        ``IDLE_SECONDS`` first, unless ``pause`` is False. While the steps are paused, nothing can run.

        The drafter forgets the requests that have departed before the plan reaches the executor: a request that was
        retracted and admitted again is in the plan as a new one.
        """
        if self.paused:
            return None
        start = time.perf_counter()
        plan = self.scheduler.schedule()
        self.times.schedule += time.perf_counter() - start
        if self.scheduler.limits.draft_width:
            self._guard.forget_departed()
        if plan is not None:
            self.times.steps += 1
        elif pause and self.scheduler.has_work:
            time.sleep(IDLE_SECONDS)
        return plan

    def forward(self, plan: StepPlan) -> Failure | None:
        """Launch the forward pass of a step and sample from it. Return what was raised, or None."""
        start = time.perf_counter()  # once: the clock takes longer than the calls of ``launch`` and ``sample``
        try:
            self._executor.launch(plan)
        except BaseException as error:
            self.scheduler.take_back(plan)
            return Failure(error)
        else:
            return self._sample(plan)
        finally:
            self.times.launch += time.perf_counter() - start

    def launch(self, plan: StepPlan) -> Failure | None:
        """Launch the forward pass of a step. Return what was raised, or None: the caller must then call ``sample``
        next."""
        start = time.perf_counter()
        try:
            self._executor.launch(plan)
        except BaseException as error:
            self.scheduler.take_back(plan)
            return Failure(error)
        finally:
            self.times.launch += time.perf_counter() - start

    def sample(self, plan: StepPlan) -> Failure | None:
        """Sample from the step that was launched last. Return what was raised, or None."""
        start = time.perf_counter()
        try:
            return self._sample(plan)
        finally:
            self.times.launch += time.perf_counter() - start

    def _sample(self, plan: StepPlan) -> Failure | None:
        executor = self._executor
        try:
            executor.sample(plan, self.scheduler.masks(plan, executor.mask_buffer) if plan.constrained else None)
        except BaseException as error:
            return Failure(error)
        return None

    def commit(self, plan: StepPlan, observer: DrafterGuard | None = None) -> list[Answer]:
        """Wait for the tokens of a step and give them to its requests. If ``observer`` is given, it observes what the
        step accepted."""
        start = time.perf_counter()
        try:
            result = self._executor.wait(plan)
        except BaseException as error:
            return self._failures.fail_step(plan, error)
        finally:
            waited = time.perf_counter()
            self.times.wait += waited - start
        answers = self.scheduler.commit(plan, result)
        committed = time.perf_counter()
        self.times.commit += committed - waited
        if observer is not None:
            observer.observe(plan)
            self.times.draft += time.perf_counter() - committed
        return answers

    def fail(self, plan: StepPlan, failure: Failure) -> list[Answer]:
        """End the requests of a step that failed. The step before it must have been committed."""
        return self._failures.fail_step(plan, failure.error)

    def reserve_ahead(self) -> None:
        """Reserve pages for the drafts of the next step while the device computes this one, so that this work does not
        delay the next step. Raises ``EngineDeadError`` if the engine fails."""
        updates = self.scheduler.reserve_ahead()
        self._failures.run_engine(lambda: self._executor.locate_updates(updates), "while it prepared page updates")
