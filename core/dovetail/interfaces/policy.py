"""Define schedule policies, which order the waiting queue."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from pydantic import BaseModel

    from dovetail.interfaces.cache import CachedPrefixes
    from dovetail.types import Req


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """Hold what a policy may read: ``cache``, in which it may match prefixes."""

    cache: CachedPrefixes


class SchedulePolicy(ABC):
    """Decide which waiting request the scheduler admits next.

    A policy must not starve any request: under a finite stream of requests, every request becomes the first eventually.
    If ``order`` raises, or returns anything but a permutation, the scheduler logs and counts it, and admits the requests
    of that step first come first served.

    If requests of several tenants wait, the tenants take turns: the scheduler then changes the order that the policy
    returns, but not the order of one tenant's requests. A policy whose order depends on ``Req.priority`` sets
    ``by_priority``. Turns are then taken among requests of equal priority only.
    """

    by_priority: ClassVar[bool] = False

    def __init__(self, config: BaseModel, context: PolicyContext) -> None:
        """Store what the policy needs of ``config``, which is this policy's own config section, and of ``context``."""

    @abstractmethod
    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        """Return a permutation of ``waiting`` in which the first request is admitted first. Must not mutate the
        requests.

        ``running`` are the requests that have been admitted and have not finished. The scheduler calls this method once
        per step while requests wait, so it must be cheap.
        """
