"""Define the policies that depend only on the requests."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.interfaces.policy import PolicyContext, SchedulePolicy
from dovetail.types import Req
from dovetail_policies.config import FcfsConfig, PriorityConfig
from dovetail_policies.window import by_arrival


class Fcfs(SchedulePolicy):
    """Admit requests in the order of their arrival."""

    def __init__(self, config: FcfsConfig, context: PolicyContext) -> None:
        """Create the policy. ``config`` has no settings."""

    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        """Return ``waiting`` by arrival."""
        return sorted(waiting, key=by_arrival)


class Priority(SchedulePolicy):
    """Admit the highest priority first, and requests of equal priority by arrival.

    With ageing, the rank of a request is its priority plus its waiting time divided by ``ageing_seconds``. All requests
    age at the same rate, so their order does not depend on the current time: rank = now / ageing_seconds + (priority -
    arrival / ageing_seconds).
    """

    by_priority = True

    def __init__(self, config: PriorityConfig, context: PolicyContext) -> None:
        """Create the policy. ``config.ageing_seconds=None`` makes priority strict."""
        self._levels_per_second = 0.0 if config.ageing_seconds is None else 1 / config.ageing_seconds

    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        """Return ``waiting`` by rank, then by arrival."""
        return sorted(waiting, key=self._rank)

    def _rank(self, req: Req) -> tuple[float, float]:
        return req.arrival * self._levels_per_second - req.priority, req.arrival
