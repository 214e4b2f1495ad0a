"""Call a drafter in a way that its failures cost a step its drafts and nothing else.

A failure is an exception that the drafter raises, drafts that break the contract of ``Drafter.propose``, or an
interrupt (Ctrl-C) that arrives while the drafter runs. If a drafter with ``must_see_all`` is interrupted in
``observe``, it cannot draft for the step's requests any more.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.interfaces.executor import StepVerbs
    from dovetail.loop.failures import FailureHandler
    from dovetail.scheduler.scheduler import Scheduler
    from dovetail.types import StepPlan

log = logging.getLogger(__name__)


class DrafterGuard:
    """Call the drafter of ``executor``. Exceptions that it raises are logged and counted in ``errors``. Interrupts are
    logged and deferred to the end of the step."""

    def __init__(self, executor: StepVerbs, scheduler: Scheduler, failures: FailureHandler) -> None:
        """``failures`` checks for every error whether the device is lost, and keeps interrupts until the step is
        over."""
        self.errors = 0
        self._has_exceeded = False
        self._observes = executor.info.observes
        self._executor, self._scheduler, self._failures = executor, scheduler, failures

    def propose(self, plan: StepPlan) -> None:
        """Request drafts for the step of ``plan`` and attach them to the plan."""
        consequence = "this step runs without drafts"
        try:
            drafts = self._executor.propose(plan)
        except BaseException as error:
            self._caught(error, consequence)
            return
        if drafts is None:
            return
        try:
            excess = self._scheduler.attach(plan, drafts)
        except Exception as error:
            self._failed(error, consequence)
            return
        if excess:
            self._exceeded(excess)

    def observe(self, plan: StepPlan) -> None:
        """Show the drafter what the step that was committed last accepted."""
        if not self._observes:
            return
        try:
            self._executor.observe(plan, self._scheduler.committed())
        except BaseException as error:
            self._caught(error, "it has not seen what this step accepted")

    def forget_departed(self) -> None:
        """Make the drafter forget the requests that have ended or were retracted since the last call."""
        for request in self._scheduler.take_departed():
            try:
                self._executor.forget((request,))
            except BaseException as error:
                self._caught(error, f"it may keep the state of request {request.uid}")

    def _exceeded(self, excess: str) -> None:
        """Count drafts that were cut to what the drafter has declared, and log the first."""
        self.errors += 1
        if not self._has_exceeded:
            self._has_exceeded = True
            log.error(
                "the drafter returned %s; they were cut to what it declared (logged once, counted always)", excess
            )

    def _caught(self, error: BaseException, consequence: str) -> None:
        if isinstance(error, Exception):
            self._failed(error, consequence)
            return
        self._failures.raise_if_lost(error)
        log.warning("the drafter was interrupted; %s", consequence)
        self._failures.defer(error)

    def _failed(self, error: Exception, consequence: str) -> None:
        self._failures.raise_if_lost(error)
        self.errors += 1
        log.error("the drafter failed (%d times so far); %s", self.errors, consequence, exc_info=error)
