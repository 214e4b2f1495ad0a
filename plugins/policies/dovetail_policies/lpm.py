"""Order requests by longest prefix match: those with the most cached tokens run first, before their prefixes are
evicted."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.interfaces.policy import PolicyContext, SchedulePolicy
from dovetail.types import Req
from dovetail_policies.config import LpmConfig
from dovetail_policies.window import cut


class LongestPrefixMatch(SchedulePolicy):
    """Match the ``window`` oldest requests against the cache, regardless of the length of the queue.

    Matching updates the recency of their prefixes, so that these are evicted later than prefixes of no waiting request.
    """

    def __init__(self, config: LpmConfig, context: PolicyContext) -> None:
        """Store ``context.cache``, against which requests are matched."""
        self._config = config
        self._cache = context.cache

    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        """Return overdue requests, then the others by cached tokens (ties by arrival), then those outside the
        window."""
        overdue, free, rest = cut(waiting, self._config.window, self._config.max_wait_seconds)
        return overdue + sorted(free, key=self._cached, reverse=True) + rest

    def _cached(self, req: Req) -> int:
        """Return the number of tokens that need not be computed. The last token is always computed."""
        return self._cache.match(req.token_ids[: req.known_len - 1], req.namespace).length
