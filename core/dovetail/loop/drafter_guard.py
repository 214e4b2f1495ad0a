"""Call a drafter in a way that its failures cost a step its drafts and nothing else.

A failure is an exception that the drafter raises, drafts that break the contract of ``Drafter.propose``, or an
interrupt (Ctrl-C) that arrives while the drafter runs. If a drafter with ``must_see_all`` is interrupted in
``observe``, it cannot draft for the step's requests any more.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.interfaces.speculative import Drafter
    from dovetail.loop.failures import FailureHandler
    from dovetail.scheduler.scheduler import Scheduler
    from dovetail.types import Batch, ForwardOutput

log = logging.getLogger(__name__)


class DrafterGuard:
    """Call ``drafter``, which may be None. Exceptions that it raises are logged and counted in ``errors``. Interrupts
    are logged and deferred to the end of the step."""

    def __init__(self, drafter: Drafter | None, scheduler: Scheduler, failures: FailureHandler) -> None:
        """``failures`` checks for every error whether the device is lost, and keeps interrupts until the step is
        over."""
        self.drafter = drafter
        self.errors = 0
        self._scheduler, self._failures = scheduler, failures

    def propose(self, batch: Batch) -> None:
        """Request drafts for the step of ``batch`` and attach them to the batch."""
        if self.drafter is None:
            return
        consequence = "this step runs without drafts"
        try:
            drafts = self.drafter.propose(batch)
        except BaseException as error:
            self._caught(error, consequence)
            return
        if drafts is None:
            return
        try:
            self._scheduler.attach(batch, drafts)
        except Exception as error:
            self._failed(error, consequence)

    def observe(self, batch: Batch, output: ForwardOutput) -> None:
        """Show the drafter what a step accepted."""
        if self.drafter is None:
            return
        try:
            self.drafter.observe(batch, output)
        except BaseException as error:
            self._caught(error, "it has not seen what this step accepted")

    def forget_departed(self) -> None:
        """Inform the drafter of the requests that have ended or were retracted since the last call."""
        departed = self._scheduler.take_departed()
        if not departed or self.drafter is None:
            return
        for req in departed:
            try:
                self.drafter.forget(req)
            except BaseException as error:
                self._caught(error, f"it may keep the state of request {req.rid}")

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
