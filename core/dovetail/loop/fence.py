"""A fence around drafters: one that raises, or whose drafts break its contract, costs a step its drafts and nothing else. So does
an interrupt (Ctrl-C) that arrives in one; one that must see all, and was interrupted while it was shown a step, has no more drafts
for its requests."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.interfaces.speculative import Drafter
    from dovetail.scheduler.scheduler import Scheduler
    from dovetail.types import Batch, ForwardOutput, Req

log = logging.getLogger(__name__)


class Fence:
    """Calls a drafter; what it raises is logged and counted in ``errors``."""

    def __init__(self, check: Callable[[BaseException], None], interrupted: Callable[[BaseException], None]) -> None:
        """``check`` is shown every error, and raises where it concerns more than the drafter. ``interrupted`` gets what is no
        error of the drafter's, to be raised when the books are in order."""
        self.errors = 0
        self._check, self._interrupted = check, interrupted

    def propose(self, drafter: Drafter, scheduler: Scheduler, batch: Batch) -> None:
        """Ask for drafts of a step and attach them to it."""
        consequence = "this step runs without drafts"
        try:
            drafts = drafter.propose(batch)
        except BaseException as error:
            self._caught(error, consequence)
            return
        if drafts is None:
            return
        try:
            scheduler.attach(batch, drafts)
        except Exception as error:
            self._failed(error, consequence)

    def observe(self, drafter: Drafter, batch: Batch, output: ForwardOutput) -> None:
        """Show what a step accepted."""
        try:
            drafter.observe(batch, output)
        except BaseException as error:
            self._caught(error, "it has not seen what this step accepted")

    def forget(self, drafter: Drafter, departed: list[Req]) -> None:
        """Say which requests have gone."""
        for req in departed:
            try:
                drafter.forget(req)
            except BaseException as error:
                self._caught(error, f"it may keep the state of request {req.rid}")

    def _caught(self, error: BaseException, consequence: str) -> None:
        if isinstance(error, Exception):
            self._failed(error, consequence)
            return
        self._check(error)
        log.warning("the drafter was interrupted; %s", consequence)
        self._interrupted(error)

    def _failed(self, error: Exception, consequence: str) -> None:
        self._check(error)
        self.errors += 1
        log.error("the drafter failed (%d times so far); %s", self.errors, consequence, exc_info=error)
