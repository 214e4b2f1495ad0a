"""Move pages between requests, the prefix cache and the allocator. Only this module changes the owner of a page.

    row of a request   [ shared_pages: the cache's, locked | the request's own ......... ]
                       0                                   shared_pages          num_pages

A page is in exactly one of three places: the allocator's free list, the prefix cache, or one request's own part. Slots of
states are managed by ``memory.states``.

In a sliding group, a row has holes (page 0) in the columns that no later token of the request sees. The cache may evict its
pages of these columns, and the request's own ones are freed while it runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dovetail.interfaces.cache import first_needed
from dovetail.memory.arena import ArenaAllocator
from dovetail.memory.states import StateLedger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dovetail.interfaces.cache import GroupDescriptor, Match, PrefixCache
    from dovetail.memory.allocator import PageAllocator
    from dovetail.memory.table import RequestTable
    from dovetail.types import IntArray, Req


class PageLedger:
    """Manage the pages of running requests. Mutates ``slot``, ``num_pages``, ``shared_pages``, ``cache_handle`` and ``states``
    of requests."""

    def __init__(
        self,
        allocator: PageAllocator | ArenaAllocator,
        cache: PrefixCache,
        table: RequestTable,
        page_size: int,
        tokens_ahead: int = 0,
        groups: Sequence[GroupDescriptor] = (),
        pool: int = 0,
    ) -> None:
        """Store the three owners of pages. ``tokens_ahead`` is the number of tokens after a page that are part of the
        page's key in ``cache``; see ``memory.lookahead``. ``groups`` are those that ``cache`` was built for; without them,
        every group keeps all pages. With state groups, the allocator is an ``ArenaAllocator``. The ledger
        manages the requests in the slots of ``pool`` (see ``memory.pools``)."""
        self.pool = pool
        self.allocator = allocator
        self.cache = cache
        self.table = table
        self.page_size = page_size
        paged = [group for group in groups if group.paged]
        self._sliding = [(at, group) for at, group in enumerate(paged) if not group.dense]
        self.slides = bool(self._sliding)
        # [groups, slots] the number of columns at the beginning of each row that are holes
        self._holes = np.zeros(table.pages.shape[:2], np.int32)
        self.tokens_ahead = tokens_ahead
        self.states: StateLedger | None = None
        self.paged = list(range(len(table.pages)))  # the numbers of the groups that have a row in the table
        self._slab_sizes: list[int] = []  # pages or slots in a slab of each group that can lose single ones
        if isinstance(allocator, ArenaAllocator) and not all(group.dense for group in groups):
            sizes = zip(groups, allocator.layout.pages, strict=True)
            self._slab_sizes = [0 if group.dense else size for group, size in sizes]
        if len(paged) < len(groups):
            assert isinstance(allocator, ArenaAllocator), "slots of states come from an arena"
            self.paged = [at for at, group in enumerate(groups) if group.paged]
            self.states = StateLedger(allocator, cache, table, page_size, tokens_ahead, groups)
        self.release_pinned: Callable[[int], bool] = lambda short: False
        """Release cached pages that are locked only for speed. Called with the number of missing pages; returns False
        if releasing cannot provide them. The scheduler replaces it by ``Pins.release_pinned``."""

    @property
    def members(self) -> tuple[PageLedger, ...]:
        """Return the ledger of each pool: this one is the only one."""
        return (self,)

    def of(self, req: Req) -> PageLedger:
        """Return the ledger that manages the pages of a running request."""
        return self

    @property
    def num_free_slots(self) -> int:
        """Return the number of requests that can still be admitted."""
        return self.table.num_free_of(self.pool)

    @property
    def available(self) -> int:
        """Return the number of pages of each group that can certainly be allocated now: the free pages and those that the
        cache can evict."""
        return self.allocator.allocatable(self.cache.evictable)

    def ensure_available(self, count: int, slots: int = 0) -> bool:
        """Return True if ``count`` pages of each group can be allocated, together with ``slots`` slots of each state group.
        Where memory must move from one group to another for that, evicts until it has moved. If necessary, drops the tails of
        requests, and releases pages that are locked only for speed."""
        while (short := self._short_of(count, slots)) > 0:
            if not self._move_memory(count, slots) and not self._drop_tail() and not self.release_pinned(short):
                return False
        return True

    def _short_of(self, count: int, slots: int) -> int:
        """Return how many pages of each group are missing, positive also if only slots are."""
        if not slots:
            return count - self.available
        assert isinstance(self.allocator, ArenaAllocator)
        return count - self.allocator.allocatable(self.cache.evictable, slots)

    def _move_memory(self, count: int, slots: int) -> bool:
        """Evict an eighth of what can be evicted, so that memory of one group becomes free for another. Return False, and
        evict nothing, if this cannot provide ``count`` pages and ``slots`` slots of each group."""
        evictable = self.cache.evictable
        extra = (slots,) if slots else ()
        if not any(evictable) or not self.allocator.may_suffice(count, evictable, *extra):
            return False
        self.allocator.free(self.cache.evict([-(-pages // 8) for pages in evictable]))
        return True

    def _drop_tail(self) -> bool:
        return self.states is not None and self.states.drop_tail()

    def pages_for(self, length: int) -> int:
        """Return the number of pages that hold ``length`` tokens."""
        return -(-length // self.page_size)

    def admit(self, req: Req, match: Match) -> None:
        """Give the request a slot whose row begins with the matched pages, and slots for its states. The caller has locked
        ``match.handle``; from now on the lock belongs to the request. Slots must be available, together with the pages for
        all tokens of the request (``ensure_available``)."""
        req.slot = self.table.take_slot(self.pool)
        req.cache_handle = match.handle
        req.cached_len = match.length
        req.num_pages = req.shared_pages = match.pages.shape[1]
        if req.num_pages:
            self.table.write(req.slot, 0, match.pages)
        if self.slides:
            self._holes[:, req.slot] = 0
            for at, group in self._sliding:
                self._holes[at, req.slot] = first_needed(group, match.length, self.page_size)
        if self.states is not None:
            self._make_free(self.pages_for(req.device_len) - req.num_pages, 1)
            self.states.admit(req, match)

    def _make_free(self, count: int, slots: int) -> None:
        """Evict until ``count`` pages of each group and ``slots`` slots of each state group are free. There must be enough."""
        assert isinstance(self.allocator, ArenaAllocator)
        while any(short := self.allocator.shortage(count, self.cache.evictable, slots)):
            if not self._drop_unneeded():
                self.allocator.free(self.cache.evict(short))

    def _drop_unneeded(self) -> bool:
        """Drop about a slab of what the cache holds in groups of other kinds than full and latent and no likely match needs:
        memory is better used by any other group. Return False if there is nothing of the kind."""
        if not self._slab_sizes:
            return False
        freed = self.cache.evict_unneeded(self._slab_sizes)
        if freed:
            self.allocator.free(freed)
        return bool(freed)

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
            self._give_back(self.table.pages[:, req.slot, kept : req.num_pages].copy())
            req.num_pages = kept

    def release_behind(self, req: Req, length: int) -> None:
        """Free the pages of sliding groups that no token of the request from ``length`` on sees, and that the cache does not
        need to resume after the full pages of ``length``: the request may end before it fills another one. The KV of the
        first ``length`` tokens is computed, and no rollback goes behind them. Steps in flight may still read these pages,
        because steps run in order. The request's own pages are freed. Those of the cache are unlocked when a quarter of
        a window has left: the request's tokens are then offered to the cache, and the lock moves on. In models with states,
        the pages stay that are needed to resume at the tail of the request (``memory.states``)."""
        if self.states is not None:
            length = min(length, self.states.tail_length(req, length))
        for at, group in self._sliding:
            assert group.window is not None
            first = first_needed(group, length - length % self.page_size, self.page_size)
            begin = int(self._holes[at, req.slot])
            if begin < req.shared_pages and first - begin >= max(1, group.window // self.page_size // 4):
                self.share(req, length)
                begin = int(self._holes[at, req.slot])
            begin = max(begin, req.shared_pages)
            if first > begin:
                self._free_own(req, at, begin, min(first, req.num_pages))

    def _free_own(self, req: Req, at: int, begin: int, end: int) -> None:
        """Free the request's own pages of one group in the columns ``[begin, end)``, which become holes."""
        row = self.table.pages[:, req.slot, begin:end].copy()
        freed = [row[group] if group == at else row[group][:0] for group in range(len(row))]
        self._give_back(freed)
        row[at] = 0
        self.table.write(req.slot, begin, row)
        self._holes[at, req.slot] = end

    def _give_back(self, pages: IntArray | Sequence[IntArray]) -> None:
        """Free the pages of each paged group; holes are ignored."""
        pages = [own[own > 0] for own in pages] if self.slides else pages
        self.allocator.free(pages if self.states is None else self.states.with_slots(pages))

    def _take(self, count: int) -> IntArray | None:
        """Return pages ``[groups, count]``, evicting cached prefixes if necessary, or None if there are not enough."""
        pages = self.allocator.alloc(count)
        while pages is None and self._drop_unneeded():
            pages = self.allocator.alloc(count)
        if pages is None:
            if not self.ensure_available(count):
                return None
            self.allocator.free(self.cache.evict(self.allocator.shortage(count, self.cache.evictable)))
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
        if self.slides:
            self._share_sliding(req, own[:, :kept], held)
        else:
            duplicate = np.flatnonzero((held.pages != own[:, :kept]).any(axis=0))
            if len(duplicate):
                self._give_back(own[:, duplicate])
                self.table.write(req.slot, 0, held.pages)
        self._hold(req, held)

    def _share_sliding(self, req: Req, own: IntArray, held: Match) -> None:
        """Free the pages of ``own`` that ``held`` has others for, and let the request read those that are in ``held`` and that
        its lock will protect."""
        before = req.shared_pages  # the columns before it were the cache's already
        fresh = own[:, before:]
        self._give_back([mine[mine != theirs] for mine, theirs in zip(fresh, held.pages[:, before:], strict=True)])
        row = held.pages.copy()
        for at, group in self._sliding:
            first = first_needed(group, held.length, self.page_size)
            assert row[at, first:].all(), "the cache has no page that its lock must protect"
            row[at, :first] = 0
            self._holes[at, req.slot] = max(first, self._holes[at, req.slot])
        changed = np.flatnonzero((row != own).any(axis=0))
        if len(changed):
            begin, end = int(changed[0]), int(changed[-1]) + 1
            self.table.write(req.slot, begin, row[:, begin:end])

    def release(self, req: Req, *, computed_len: int = 0) -> None:
        """Remove the request from the table. Offer the pages of its first ``computed_len`` tokens to the prefix cache
        first, as ``share`` does, and the latest copy of its states."""
        self.share(req, computed_len)
        if self.states is not None:
            self.states.release(req, computed_len)
        own = self.table.pages[:, req.slot, req.shared_pages : req.num_pages]
        if own.shape[1]:
            self._give_back(own.copy())
        self.cache.unlock(req.cache_handle)
        self.table.free_slot(req.slot)
        req.slot, req.num_pages, req.shared_pages, req.cache_handle = -1, 0, 0, None

    def flush(self) -> int:
        """Drop every cached prefix that is not locked, free its pages and return their number."""
        pages = self.cache.reset()
        self.allocator.free(pages)
        return max(map(len, pages))

    def _hold(self, req: Req, held: Match) -> None:
        self.cache.lock(held.handle)
        self.cache.unlock(req.cache_handle)
        req.cache_handle = held.handle
        req.shared_pages = held.pages.shape[1]

    def check_integrity(self, running: list[Req]) -> None:
        """Assert that every page is in exactly one place. Takes time linear in the pool's size; for idle times and
        tests."""
        owned = np.zeros(len(self.table.pages), np.int64)
        for req in running:
            owned += np.count_nonzero(self.table.pages[:, req.slot, req.shared_pages : req.num_pages], axis=1)
        held, cached = self.allocator.num_held, self.cache.total
        counts = dict(zip(self.paged, owned.tolist(), strict=True))
        slots = 0 if self.states is None else self.states.count(running)
        for group, count in enumerate(held):
            own = counts.get(group, slots)
            assert count == cached[group] + own, (
                f"group {group}: {count} pages or slots are in use, but {cached[group]} are cached and {own} owned"
            )
        for req in running:
            row = self.table.pages[:, req.slot, : req.num_pages]
            held = self.allocator.are_held(row) if self.states is None else self.states.are_held(row)
            assert held, f"{req.rid} reads a page that is free"
            for at, own in enumerate(row):
                assert own[self._holes[at, req.slot] :].all(), f"{req.rid} has a hole in what it reads"
        self.cache.check_integrity()
