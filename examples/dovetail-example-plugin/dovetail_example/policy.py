"""Prefer short prompts."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.interfaces.policy import PolicyContext, SchedulePolicy
from dovetail.types import Req
from dovetail_example.config import ShortestConfig


class ShortestFirst(SchedulePolicy):
    """Admit the shortest prompt first. Waiting makes a prompt count as shorter, so that long ones do not starve."""

    def __init__(self, config: ShortestConfig, context: PolicyContext) -> None:
        self._tokens_per_second = config.tokens_per_second

    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        """See ``SchedulePolicy``."""
        return sorted(waiting, key=self._rank)

    def _rank(self, req: Req) -> tuple[float, float]:
        """Return the length less the value of waiting. The current time is left out, because it is the same for all."""
        return req.prompt_len + req.arrival * self._tokens_per_second, req.arrival
