"""Move pages between requests, the prefix cache and the allocator. Only this module changes the owner of a page.

    row of a request   [ shared_pages: the cache's, locked | the request's own ......... ]
                       0                                   shared_pages          num_pages

A page is in exactly one of three places: the allocator's free list, the prefix cache, or one request's own part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dovetail.interfaces.cache import Match, PrefixCache
    from dovetail.memory.allocator import PageAllocator
    from dovetail.memory.table import RequestTable
    from dovetail.types import IntArray, Req


class PageLedger:
    """Manage the pages of running requests. Mutates ``slot``, ``num_pages``, ``shared_pages`` and ``cache_handle`` of
    requests."""

    def __init__(
        self,
        allocator: PageAllocator,
        cache: PrefixCache,
        table: RequestTable,
        page_size: int,
        tokens_ahead: int = 0,
    ) -> None:
        """Store the three owners of pages. ``tokens_ahead`` is the number of tokens after a page that are part of the
        page's key in ``cache``; see ``memory.lookahead``."""
        self.allocator = allocator
        self.cache = cache
        self.table = table
        self._num_groups = len(table.pages)
        self.page_size = page_size
        self.tokens_ahead = tokens_ahead
        self.release_pinned: Callable[[int], bool] = lambda short: False
        """Release cached pages that are locked only for speed. Called with the number of missing pages; returns False
        if releasing cannot provide them. The scheduler replaces it by ``Pins.release_pinned``."""

    @property
    def available(self) -> int:
        """Return the number of pages that can be allocated now: the free pages and the pages that the cache can
        evict."""
        return self.allocator.num_free + min(self.cache.evictable)

    def ensure_available(self, count: int) -> bool:
        """Return True if ``count`` pages can be allocated. Releases pages that are locked only for speed if
        necessary."""
        while (short := count - self.available) > 0:
            if not self.release_pinned(short):
                return False
        return True

    def pages_for(self, length: int) -> int:
        """Return the number of pages that hold ``length`` tokens."""
        return -(-length // self.page_size)

    def admit(self, req: Req, match: Match) -> None:
        """Give the request a slot whose row begins with the matched pages. The caller has locked ``match.handle``; from
        now on the lock belongs to the request."""
        req.slot = self.table.take_slot()
        req.cache_handle = match.handle
        req.cached_len = match.length
        req.num_pages = req.shared_pages = match.pages.shape[1]
        if req.num_pages:
            self.table.write(req.slot, 0, match.pages)

    def reserve(self, req: Req, length: int) -> bool:
        """Extend the request's row to hold ``length`` tokens, evicting cached prefixes if necessary. Return False if
        there are not enough pages; then nothing has changed except the evictions."""
        need = self.pages_for(length) - req.num_pages
        if need <= 0:
            return True
        pages = self._take(need)
        if pages is None:
            return False
        self.table.write(req.slot, req.num_pages, pages)
        req.num_pages += need
        return True

    def reserve_one_each(self, reqs: Sequence[Req]) -> bool:
        """Extend the row of each request by one page, as ``reserve`` does. Return False, and extend no row, if there
        are not enough pages for all."""
        pages = self._take(len(reqs))
        if pages is None:
            return False
        self.table.write_each([req.slot for req in reqs], [req.num_pages for req in reqs], pages)
        for req in reqs:
            req.num_pages += 1
        return True

    def trim(self, req: Req, length: int) -> None:
        """Give back the request's own pages after those that hold ``length`` tokens. No launched step may still write
        to these pages."""
        kept = max(self.pages_for(length), req.shared_pages)
        if kept < req.num_pages:
            self.allocator.free(self.table.pages[:, req.slot, kept : req.num_pages].copy())
            req.num_pages = kept

    def _take(self, count: int) -> IntArray | None:
        """Return pages ``[groups, count]``, evicting cached prefixes if necessary, or None if there are not enough."""
        short = count - self.allocator.num_free
        if short > 0:
            if not self.ensure_available(count):
                return None
            self.allocator.free(np.stack(self.cache.evict((short,) * self._num_groups)))
        pages = self.allocator.alloc(count)
        assert pages is not None, "the cache evicted fewer pages than evictable stated"
        return pages

    def share(self, req: Req, length: int) -> None:
        """Offer the request's full pages of its first ``length`` tokens to the prefix cache. Steps that were launched
        must compute their KV. Where the cache already had a page for these tokens, the request reads that page from now
        on and frees its own."""
        count = min(length, req.known_len) // self.page_size
        if count <= req.shared_pages:
            return
        own = self.table.pages[:, req.slot, :count].copy()
        known = min(count * self.page_size + self.tokens_ahead, req.known_len)
        held = self.cache.insert(req.token_ids[:known], own, req.namespace, req.priority)
        kept = held.pages.shape[1]
        duplicate = np.flatnonzero((held.pages != own[:, :kept]).any(axis=0))
        if len(duplicate):
            self.allocator.free(own[:, duplicate])
            self.table.write(req.slot, 0, held.pages)
        self._hold(req, held)

    def release(self, req: Req, *, computed_len: int = 0) -> None:
        """Remove the request from the table. Offer the pages of its first ``computed_len`` tokens to the prefix cache
        first, as ``share`` does."""
        self.share(req, computed_len)
        own = self.table.pages[:, req.slot, req.shared_pages : req.num_pages]
        if own.shape[1]:
            self.allocator.free(own.copy())
        self.cache.unlock(req.cache_handle)
        self.table.free_slot(req.slot)
        req.slot, req.num_pages, req.shared_pages, req.cache_handle = -1, 0, 0, None

    def flush(self) -> int:
        """Drop every cached prefix that is not locked, free its pages and return their number."""
        pages = np.stack(self.cache.reset())
        self.allocator.free(pages)
        return pages.shape[1]

    def _hold(self, req: Req, held: Match) -> None:
        self.cache.lock(held.handle)
        self.cache.unlock(req.cache_handle)
        req.cache_handle = held.handle
        req.shared_pages = held.pages.shape[1]

    def check_integrity(self, running: list[Req]) -> None:
        """Assert that every page is in exactly one place. Takes time linear in the pool's size; for idle times and
        tests."""
        owned = sum(req.num_pages - req.shared_pages for req in running)
        total, free, cached = self.allocator.num_total, self.allocator.num_free, self.cache.total[0]
        assert free + cached + owned == total, f"pages: {free} free + {cached} cached + {owned} owned != {total}"
        for req in running:
            row = self.table.pages[:, req.slot, : req.num_pages]
            assert self.allocator.are_held(row), f"{req.rid} reads a page that is free"
        self.cache.check_integrity()
