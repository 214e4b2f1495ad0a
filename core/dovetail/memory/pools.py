"""Manage the pages of several pools: with data-parallel attention, each rank keeps the pages of its own requests.

Each pool has an allocator, a prefix cache and a ``PageLedger``. A request gets its pool with its slot, when it is admitted,
and keeps it while it runs. Page numbers count the pages of one pool. There is one request table, which all ranks have: a
rank reads the rows of its own slots only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dovetail.interfaces.cache import CachedPrefixes, Match
from dovetail.memory.table import pool_of

if TYPE_CHECKING:
    from dovetail.memory.ledger import PageLedger
    from dovetail.memory.table import RequestTable
    from dovetail.types import IntArray, Req


class PoolLedgers:
    """Manage the pages and states of running requests in several pools. The methods have the contracts of ``PageLedger``, whose
    methods they call for the pools of the requests."""

    def __init__(self, members: Sequence[PageLedger], table: RequestTable) -> None:
        """``members`` are the ledgers of the pools, in order, which share ``table``."""
        self.members = tuple(members)
        self.table = table
        first = self.members[0]
        self.page_size, self.tokens_ahead, self.slides = first.page_size, first.tokens_ahead, first.slides

    def of(self, req: Req) -> PageLedger:
        """See ``PageLedger.of``."""
        return self.members[pool_of(req.slot, len(self.members))]

    def pages_for(self, length: int) -> int:
        """See ``PageLedger.pages_for``."""
        return -(-length // self.page_size)

    def reserve(self, req: Req, length: int) -> bool:
        """See ``PageLedger.reserve``."""
        return self.of(req).reserve(req, length)

    def reserve_one_each(self, reqs: Sequence[Req]) -> bool:
        """See ``PageLedger.reserve_one_each``. If one pool has not enough pages, requests of other pools may have got one."""
        own: list[list[Req]] = [[] for _ in self.members]
        for req in reqs:
            own[pool_of(req.slot, len(own))].append(req)
        return all(member.reserve_one_each(mine) for member, mine in zip(self.members, own, strict=True) if mine)

    def trim(self, req: Req, length: int) -> None:
        """See ``PageLedger.trim``."""
        self.of(req).trim(req, length)

    def release_behind(self, req: Req, length: int) -> None:
        """See ``PageLedger.release_behind``."""
        self.of(req).release_behind(req, length)

    def share(self, req: Req, length: int) -> None:
        """See ``PageLedger.share``."""
        self.of(req).share(req, length)

    def release(self, req: Req, *, computed_len: int = 0) -> None:
        """See ``PageLedger.release``."""
        self.of(req).release(req, computed_len=computed_len)

    def flush(self) -> int:
        """See ``PageLedger.flush``. Return the number of pages of all pools."""
        return sum(member.flush() for member in self.members)

    def check_integrity(self, running: list[Req]) -> None:
        """See ``PageLedger.check_integrity``."""
        for member in self.members:
            member.check_integrity([req for req in running if self.of(req) is member])


class PoolCaches(CachedPrefixes):
    """Show the prefix caches of several pools together."""

    def __init__(self, caches: Sequence[CachedPrefixes]) -> None:
        """Store the caches, of which each keeps pages of its own pool."""
        self._caches = tuple(caches)

    def match(self, tokens: IntArray, namespace: str = "") -> Match:
        """Return the longest of the matches of all caches."""
        return max((cache.match(tokens, namespace) for cache in self._caches), key=lambda match: match.length)

    @property
    def evictable(self) -> tuple[int, ...]:
        """Return the sums over the pools."""
        return tuple(map(sum, zip(*(cache.evictable for cache in self._caches), strict=True)))

    @property
    def total(self) -> tuple[int, ...]:
        """Return the sums over the pools."""
        return tuple(map(sum, zip(*(cache.total for cache in self._caches), strict=True)))
