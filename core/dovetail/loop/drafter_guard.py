"""Call a drafter so that its failures cost a step its drafts and nothing else.

This holds for a drafter that raises, for drafts that break the contract of ``Drafter.propose``, and for an interrupt (Ctrl-C) that
arrives in a drafter. A drafter with ``must_see_all`` that is interrupted in ``observe`` has no more drafts for the step's requests.
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
    """Call ``drafter``, which may be None. What it raises is logged and counted in ``errors``."""

    def __init__(self, drafter: Drafter | None, scheduler: Scheduler, failures: FailureHandler) -> None:
        """``failures`` checks every error for a lost device, and keeps interrupts until the step is over."""
        self.drafter = drafter
        self.errors = 0
        self._scheduler, self._failures = scheduler, failures

    def propose(self, batch: Batch) -> None:
        """Request drafts for a step and attach them to it."""
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
