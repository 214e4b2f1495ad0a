"""Longest prefix match: what the cache holds most of goes first, before it is evicted."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.interfaces.policy import PolicyContext, SchedulePolicy
from dovetail.types import Req
from dovetail_policies.config import LpmConfig
from dovetail_policies.window import cut


class LongestPrefixMatch(SchedulePolicy):
    """Asks the cache about the ``window`` oldest requests, whatever the length of the queue.

    Asking touches the recency of their prefixes, so that these outlive prefixes nobody waits for.
    """

    def __init__(self, config: LpmConfig, context: PolicyContext) -> None:
        """``context.cache`` is matched against."""
        self._config = config
        self._cache = context.cache

    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        """Overdue requests, then by cached tokens (ties by arrival), then those outside the window."""
        overdue, free, rest = cut(waiting, self._config.window, self._config.max_wait_seconds)
        return overdue + sorted(free, key=self._cached, reverse=True) + rest

    def _cached(self, req: Req) -> int:
        """Tokens that need not be computed; the last one always is."""
        return self._cache.match(req.token_ids[: req.known_len - 1], req.namespace).length
