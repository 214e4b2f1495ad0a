"""Policies that look at nothing but the request."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.interfaces.policy import PolicyContext, SchedulePolicy
from dovetail.types import Req
from dovetail_policies.config import FcfsConfig, PriorityConfig
from dovetail_policies.window import by_arrival


class Fcfs(SchedulePolicy):
    """First come, first served."""

    def __init__(self, config: FcfsConfig, context: PolicyContext) -> None:
        """``config`` has no settings."""

    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        """By arrival."""
        return sorted(waiting, key=by_arrival)


class Priority(SchedulePolicy):
    """Highest priority first, then first come, first served.

    With ageing, a request's rank is its priority plus its waiting time over ``ageing_seconds``. All wait by the same
    clock, so the order does not depend on the time: rank = now / ageing_seconds + (priority - arrival / ageing_seconds).
    """

    def __init__(self, config: PriorityConfig, context: PolicyContext) -> None:
        """``config.ageing_seconds=None`` makes priority strict."""
        self._levels_per_second = 0.0 if config.ageing_seconds is None else 1 / config.ageing_seconds

    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        """By rank, then by arrival."""
        return sorted(waiting, key=self._rank)

    def _rank(self, req: Req) -> tuple[float, float]:
        return req.arrival * self._levels_per_second - req.priority, req.arrival
