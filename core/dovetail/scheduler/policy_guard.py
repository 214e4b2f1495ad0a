"""Call the schedule policy in a way that its failures cost a step the policy's order and nothing else."""

from __future__ import annotations

import logging
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.interfaces.policy import SchedulePolicy
    from dovetail.scheduler.limits import Totals
    from dovetail.types import Req

log = logging.getLogger(__name__)

_by_arrival = attrgetter("arrival", "uid")


class PolicyGuard:
    """Order waiting requests with ``policy``.

    If the policy raises, or returns anything but a permutation of the queue, the requests of that step are admitted
    first come first served. Every failure is counted in ``Totals.policy_errors``; the traceback of the first failure of
    each class is logged.
    """

    def __init__(self, policy: SchedulePolicy, totals: Totals) -> None:
        self.policy = policy
        self._totals = totals
        self._logged: set[type[Exception]] = set()

    def order(self, waiting: list[Req], running: list[Req]) -> list[Req]:
        """Return a permutation of ``waiting``. The lists may be changed."""
        given = waiting.copy()
        try:
            ordered = list(self.policy.order(waiting, running))
            _check(given, ordered)
        except Exception as error:
            self._failed(error)
            return sorted(given, key=_by_arrival)
        return ordered

    def _failed(self, error: Exception) -> None:
        self._totals.policy_errors += 1
        if type(error) not in self._logged:
            self._logged.add(type(error))
            log.error(
                "the policy %s failed; steps in which it fails admit requests first come first served, and later "
                "failures of this class are only counted (policy_errors)",
                type(self.policy).__name__,
                exc_info=error,
            )


def _check(given: list[Req], ordered: list[Req]) -> None:
    """Raise ``ValueError`` unless ``ordered`` is a permutation of ``given``."""
    if len(ordered) == len(given) and set(map(id, ordered)) == set(map(id, given)):
        return
    ours = set(map(id, given))
    invented = sum(id(req) not in ours for req in ordered)
    missing = len(ours - set(map(id, ordered)))
    raise ValueError(
        f"the policy was given {len(given)} requests and returned {len(ordered)}: {missing} of those given are missing, "
        f"{invented} were not given; it must return each request once"
    )
