"""Decide what an error ends: the requests of one step, or the whole loop."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

from dovetail.engine.device import first_line
from dovetail.errors import EngineDeadError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.interfaces.executor import StepVerbs
    from dovetail.messages import Answer
    from dovetail.registry.resolver import Resolved
    from dovetail.scheduler.scheduler import Scheduler
    from dovetail.types import StepPlan

T = TypeVar("T")

log = logging.getLogger(__name__)

_START_AGAIN = "the engine cannot go on and must be started again"


class FailureHandler:
    """Handle what the parts of a loop raise.

    ``dead`` is the reason why the loop has ended, or None. ``interrupt`` is an interrupt (Ctrl-C) that was caught in a
    step, or None; the loop raises it once the step is over.
    """

    def __init__(self, resolved: Resolved, executor: StepVerbs, scheduler: Scheduler) -> None:
        self.dead: str | None = None
        self.interrupt: BaseException | None = None
        self._resolved, self._executor, self._scheduler = resolved, executor, scheduler
        # never freed: its traceback holds tensors of the lost device, and freeing those aborts the process
        self._kept: EngineDeadError | None = None

    def fail_step(self, plan: StepPlan, error: BaseException) -> list[Answer]:
        """End the requests of a step in which the engine raised ``error``, and return their answers. An interrupt also
        ends them, because it is unknown what the step has written. Raises ``EngineDeadError`` if the device is lost."""
        self.raise_if_lost(error)
        if not isinstance(error, Exception):
            self.defer(error)
        log.error("a step of %d requests failed", len(plan.slots), exc_info=error)
        return self._scheduler.fail(plan, f"{type(error).__name__}: {first_line(error)}")

    def defer(self, interrupt: BaseException) -> None:
        """Keep an interrupt until the step is over. If there are several, keep the first."""
        self.interrupt = self.interrupt or interrupt

    def take_interrupt(self) -> BaseException | None:
        """Return the interrupt that was kept, and forget it."""
        interrupt, self.interrupt = self.interrupt, None
        return interrupt

    def raise_if_lost(self, error: BaseException) -> None:
        """End the loop and raise ``EngineDeadError`` if the device cannot be used any more after ``error``."""
        reason = self._executor.lost(error)
        if reason is not None:
            log.error("the device was lost", exc_info=error)
            self.dead = f"the device was lost: {reason}; {_START_AGAIN}"
            self._kept = EngineDeadError(self.dead)
            raise self._kept from error

    def run_engine(self, call: Callable[[], T], when: str) -> T:
        """Return ``call()``, a call of the engine that belongs to no step. Whatever it raises ends the loop: the state of
        the engine is unknown then. Raises ``EngineDeadError`` in place of an ``Exception``, or if the loop has ended
        before."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        try:
            return call()
        except Exception as error:
            self.raise_if_lost(error)
            self.dead = f"the engine failed {when}: {type(error).__name__}: {first_line(error)}; {_START_AGAIN}"
            raise EngineDeadError(self.dead) from error
        except BaseException as error:
            self.dead = f"the engine was interrupted by {type(error).__name__} {when}; {_START_AGAIN}"
            raise

    def run(self, part: Callable[[], T]) -> T:
        """Run a part of the loop that changes the scheduler. Any exception of the part leaves the scheduler in an
        unknown state, so it ends the loop. Raises ``EngineDeadError`` in place of an ``Exception``, or if the loop has
        ended before. An interrupt is raised unchanged."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        try:
            return part()
        except EngineDeadError:
            raise
        except Exception as error:
            policy, cache = (chosen.spec.name for chosen in (self._resolved.policy, self._resolved.cache))
            self.dead = (
                f"the scheduler failed: {type(error).__name__}: {error} (policy {policy!r}, prefix cache {cache!r}); "
                f"{_START_AGAIN}"
            )
            raise EngineDeadError(self.dead) from error
        except BaseException as error:
            self.dead = f"the scheduler was interrupted by {type(error).__name__}; {_START_AGAIN}"
            raise
