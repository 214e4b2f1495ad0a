"""Keep the free list of the KV pool's pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dovetail.types import IntArray

_HELD = -1
_RESERVED = np.iinfo(np.int32).max
_SORT_WINDOW = 65536  # sorting this many pages takes about a millisecond, independently of the pool's size


class PageAllocator:
    """Hand out the pages ``1 .. num_pages - 1`` of each cache group. Page 0 is the padding page and is never handed
    out.

    The groups have pools of equal size, and every call moves the same number of pages in each. Pages are handed out in
    ascending order, and consecutively where that is cheap: an attention kernel may then read a slice instead of
    gathering.
    """

    def __init__(self, num_pages: int, num_groups: int = 1) -> None:
        """Create the free list. ``num_pages`` counts page 0."""
        assert num_pages >= 2, "a pool needs the padding page and at least one more"
        assert num_groups >= 1
        self._num_groups = num_groups
        self._num_pages = num_pages
        self._num_free = num_pages - 1
        self._returned = 0  # number of pages freed since the stack was last sorted
        descending = np.arange(num_pages - 1, 0, -1, dtype=np.int32)
        self._stack = np.tile(descending, (num_groups, 1))  # [groups, capacity]; the top is at num_free
        # [groups * num_pages]: the index of a free page in the stack of its group, _HELD, or _RESERVED for page 0
        self._place = np.empty(num_groups * num_pages, dtype=np.int32)
        self._offsets = (np.arange(num_groups, dtype=np.int32) * num_pages)[:, None]
        self._place[self._offsets] = _RESERVED
        self._record(0)

    @property
    def num_free(self) -> int:
        """Return the number of pages that ``alloc`` can hand out now, in each group."""
        return self._num_free

    @property
    def num_total(self) -> int:
        """Return the number of pages in each group, without page 0."""
        return self._num_pages - 1

    @property
    def max_page(self) -> int:
        """Return the largest page number."""
        return self._num_pages - 1

    @property
    def num_held(self) -> tuple[int, ...]:
        """Return the number of pages of each group that are handed out."""
        return (self.num_total - self._num_free,) * self._num_groups

    def used(self, evictable: Sequence[int]) -> int:
        """Return the number of pages that are handed out, without those that the prefix cache can evict."""
        return self.num_total - self.allocatable(evictable)

    def allocatable(self, extra: Sequence[int]) -> int:
        """Return the number of pages that ``alloc`` could hand out in each group if ``extra[g]`` pages of each group were
        freed before."""
        return self._num_free + min(extra)

    def may_suffice(self, count: int, extra: Sequence[int]) -> bool:
        """Return True if ``allocatable(extra)`` is at least ``count``."""
        return self.allocatable(extra) >= count

    def shortage(self, count: int, extra: Sequence[int]) -> list[int]:
        """Return how many pages of each group must be freed, at most ``extra[g]``, so that ``alloc(count)`` succeeds."""
        return [max(0, count - self._num_free)] * self._num_groups

    def alloc(self, n: int) -> IntArray | None:
        """Take ``n`` pages of each group and return them as int32 ``[groups, n]``, ascending if the free list allows
        it. Return None, and take nothing, if fewer pages are free."""
        if n > self._num_free:
            return None
        if n > 1 and self._returned * 4 > self._num_free and not self._top_is_run(n):
            self._sort()
        start = self._num_free - n
        pages = self._stack[:, start : self._num_free][:, ::-1].copy()
        self._num_free = start
        self._place[pages + self._offsets] = _HELD
        return pages

    def free(self, pages: IntArray | Sequence[IntArray]) -> None:
        """Give back the pages of each group, each of which must be held; all groups have the same number. Asserts that no
        page is freed twice."""
        pages = pages if isinstance(pages, np.ndarray) else np.stack(pages)
        groups, n = pages.shape
        assert groups == self._num_groups, f"{groups} groups of pages given back, the pool has {self._num_groups}"
        if n == 0:
            return
        assert pages.min() > 0, "page 0 is never handed out"
        flat = pages[:, ::-1] + self._offsets
        assert self._place[flat].max() == _HELD, "a page was freed that is not held"
        start = self._num_free
        assert start + n <= self.num_total, "a page was freed twice in one call"
        self._stack[:, start : start + n] = pages[:, ::-1]
        self._num_free += n
        self._returned += n
        places = np.arange(start, start + n, dtype=np.int32)
        self._place[flat] = places
        assert (self._place[flat] == places).all(), "a page was freed twice in one call"

    def postpone(self, n: int) -> None:
        """Move the ``n`` pages of each group that would be handed out next to the end of the free list. A caller that wants
        pages with large numbers calls this while the pool is not in use."""
        assert 0 <= n <= self._num_free, f"{n} pages of {self._num_free} free ones"
        self._stack[:, : self._num_free] = np.roll(self._stack[:, : self._num_free], n, axis=1)
        self._record(0)

    def are_held(self, pages: IntArray | Sequence[IntArray]) -> bool:
        """Return True if none of ``pages [groups, n]`` is free. Holes (page 0) are ignored."""
        pages = pages if isinstance(pages, np.ndarray) else np.stack(pages)
        return bool(((self._place[pages + self._offsets] == _HELD) | (pages == 0)).all())

    def check_integrity(self, held: IntArray) -> None:
        """Assert that ``held [groups, n]`` (the pages of all owners) and the free pages together are each page exactly
        once."""
        free = self._stack[:, : self._num_free]
        everything = np.sort(np.concatenate([free, held], axis=1), axis=1)
        expected = np.arange(1, self._num_pages)
        assert everything.shape[1] == len(expected), (
            f"{self._num_free} pages are free and {held.shape[1]} held, of {self.num_total}"
        )
        assert (everything == expected).all(), "a page is both free and held, held twice, or lost"
        places = np.arange(self._num_free)
        assert (self._place[free + self._offsets] == places).all(), (
            "the free list does not match the indices of its pages"
        )
        assert (self._place[held + self._offsets] == _HELD).all(), "a held page is marked free"
        assert (self._place[self._offsets] == _RESERVED).all(), "page 0 was handed out"

    def _top_is_run(self, n: int) -> bool:
        """Return True if the next ``n`` pages of each group are consecutive numbers."""
        last, first = self._stack[:, self._num_free - n], self._stack[:, self._num_free - 1]
        return bool((last - first == n - 1).all())

    def _sort(self) -> None:
        """Sort the top of the stack, so that the next pages are handed out in ascending order. The cost is spread over
        the pages that were freed since the last sort."""
        start = max(0, self._num_free - _SORT_WINDOW)
        window = self._stack[:, start : self._num_free]
        window[:] = np.sort(window, axis=1)[:, ::-1]
        self._record(start)
        self._returned = 0

    def _record(self, start: int) -> None:
        free = self._stack[:, start : self._num_free]
        self._place[free + self._offsets] = np.arange(start, self._num_free, dtype=np.int32)
