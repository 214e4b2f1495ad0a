"""A fence around drafters: one that raises, or whose drafts break its contract, costs a step its drafts and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.interfaces.speculative import Drafter
    from dovetail.scheduler.scheduler import Scheduler
    from dovetail.types import Batch, ForwardOutput, Req

log = logging.getLogger(__name__)


class Fence:
    """Calls a drafter; what it raises is logged and counted in ``errors``."""

    def __init__(self, check: Callable[[Exception], None]) -> None:
        """``check`` is shown every error, and raises where it concerns more than the drafter."""
        self.errors = 0
        self._check = check

    def propose(self, drafter: Drafter, scheduler: Scheduler, batch: Batch) -> None:
        """Ask for drafts of a step and attach them to it."""

        def ask() -> None:
            drafts = drafter.propose(batch)
            if drafts is not None:
                scheduler.attach(batch, drafts)

        self._run(ask, "this step runs without drafts")

    def observe(self, drafter: Drafter, batch: Batch, output: ForwardOutput) -> None:
        """Show what a step accepted."""
        self._run(lambda: drafter.observe(batch, output), "it has not seen what this step accepted")

    def forget(self, drafter: Drafter, departed: list[Req]) -> None:
        """Say which requests have gone."""
        for req in departed:
            self._run(lambda req=req: drafter.forget(req), f"it may keep the state of request {req.rid}")

    def _run(self, part: Callable[[], None], consequence: str) -> None:
        try:
            part()
        except Exception as error:
            self._check(error)
            self.errors += 1
            log.exception("the drafter failed (%d times so far); %s", self.errors, consequence)
