"""Schedule policies: the order of the waiting queue."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import BaseModel

    from dovetail.interfaces.cache import PrefixCache
    from dovetail.types import Req


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a policy may look at. The cache may be matched against, not changed."""

    cache: PrefixCache


class SchedulePolicy(ABC):
    """Decides who is admitted next. Called once per step while anyone waits, so it must be cheap.

    A policy must not starve: under a finite stream of requests, every one becomes first eventually.
    """

    def __init__(self, config: BaseModel, context: PolicyContext) -> None:
        """``config`` is this policy's own section."""

    @abstractmethod
    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        """A permutation of ``waiting``, the first to be admitted first. Must not mutate the requests."""
