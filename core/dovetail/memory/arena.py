"""Divide one memory among the cache groups of a model. Memory consists of equal slabs; a slab belongs to one group at a
time. A group draws a slab when it has no free page, and returns it when all of its pages are free.

    slab of group g   [ layer 0, keys | layer 0, values | layer 1, keys | ... | unused ]
                        page 0, 1, ...  page 0, 1, ...    page 0, 1, ...

Each part has a block for each of the slab's pages: the keys, or the values, of one layer. All blocks of a group have the
same size, of which the slab is a multiple. Page numbers count blocks: page i of slab s is ``s * blocks + i``. The keys of a
layer are therefore one contiguous tensor, the whole memory from the layer's first block on, in which the page number is
the index. Slab 0 has page 0 of every group, which belongs to no request.

The units of a state group are slots. A slot is one block with the states of all layers, and the slots of a slab fill it: slot
i of slab s is ``s * slots + i``. What is said of pages holds for slots, except that ``alloc`` takes pages and ``alloc_slots``
takes slots.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from dovetail.interfaces.executor import ArenaLayout
from dovetail.interfaces.store import PageBytes

if TYPE_CHECKING:
    from dovetail.types import Int64Array, IntArray

Index = TypeVar("Index", int, "IntArray")

MOST_SLABS = 1 << 14
LEAST_SLABS = 64
"""The memory is divided into at least ``LEAST_SLABS`` slabs, unless a slab would then be smaller than a page, and into at most
``MOST_SLABS``."""

UNLIMITED = 1 << 30
"""Stands for any number of pages."""


SLOT_ALIGNMENT = 16
"""Slots begin at multiples of this number of bytes."""


def make_layout(groups: Sequence[PageBytes], num_bytes: int, columns: int | None = None, slots: int = 1) -> ArenaLayout:
    """Return the layout of a memory of ``num_bytes``. The pages of ``groups`` consist of blocks only, and the slots of state
    groups have none. With ``columns``, it holds at least that number of pages of every paged group, and ``slots`` slots of
    every state group, at the same time, which may take a little more."""
    slab = _slab_bytes(groups, num_bytes)
    states = tuple(number for number, group in enumerate(groups) if not group.block)
    pages = tuple(slab // group.page if group.block else _num_slots(slab, group.page) for group in groups)
    blocks = tuple(slab // group.block if group.block else own for group, own in zip(groups, pages, strict=True))
    if columns is None:
        count = num_bytes // slab
    else:
        most = [slots if number in states else columns for number in range(len(groups))]
        count = 1 + sum(-(-need // own) for need, own in zip(most, pages, strict=True))
    return ArenaLayout(count, slab, pages, blocks, states)


def _slab_bytes(groups: Sequence[PageBytes], num_bytes: int) -> int:
    """Return the size of a slab of which the groups can use the most: a multiple of every block."""
    unit = math.lcm(*(group.block or SLOT_ALIGNMENT for group in groups))
    least = -(-max(group.page for group in groups) // unit)
    most = max(least, num_bytes // LEAST_SLABS // unit)
    first = max(least, min(most, num_bytes // MOST_SLABS // unit))
    units = np.arange(first, min(most, first + 4096) + 1, dtype=np.int64)
    waste = sum(_waste(group, units * unit) / (units * unit) for group in groups)
    return int(units[np.argmin(waste)]) * unit


def _waste(group: PageBytes, slabs: Int64Array) -> Int64Array:
    """Return the bytes that a group does not use of slabs of the sizes ``slabs``."""
    if group.block:
        return slabs % group.page
    return np.array([slab - _num_slots(slab, group.page) * group.page for slab in slabs.tolist()], np.int64)


def _num_slots(slab: int, slot: int) -> int:
    """Return the largest number of slots of ``slot`` bytes or a little more that fill a slab."""
    count = slab // slot
    while slab % (count * SLOT_ALIGNMENT):
        count -= 1
    return count


class ArenaAllocator:
    """Hand out the pages and slots of several groups of one arena. ``alloc`` takes the same number of pages of each paged
    group, ``alloc_slots`` a number of slots of each state group, and ``free`` takes back any number of each.

    Pages come from the slab of their group that has the fewest free pages, so that other slabs become empty.
    """

    def __init__(self, layout: ArenaLayout) -> None:
        self.layout = layout
        groups = range(len(layout.pages))
        self._paged = layout.paged
        self._is_paged = [group in self._paged for group in groups]
        self._nothing = [0 for _ in groups]
        self._free_slabs = list(range(layout.num_slabs - 1, 0, -1))
        self._pages: list[dict[int, list[int]]] = [{} for _ in groups]  # by slab: the free pages of the group's slabs
        self._heaps: list[list[tuple[int, int]]] = [[] for _ in groups]  # (free pages, slab), partly out of date
        self._num_free = [0 for _ in groups]  # in slabs of the group
        self._num_held = [0 for _ in groups]
        self._held = [bytearray(layout.num_slabs * own) for own in layout.pages]  # 1: the page is handed out
        self._columns: int | None = None  # ``num_free``, until it changes

    @property
    def num_free(self) -> int:
        """Return the number of pages of each paged group that ``alloc`` can take now."""
        if self._columns is None:
            self._columns = self.allocatable(self._nothing)
        return self._columns

    @property
    def num_total(self) -> int:
        """Return the number of pages of each group that the whole memory holds together (see ``ArenaLayout.columns``)."""
        return self.layout.columns

    @property
    def max_page(self) -> int:
        """Return a number that no page or slot of any group exceeds."""
        return self.layout.num_slabs * max(self.layout.blocks)

    @property
    def num_held(self) -> tuple[int, ...]:
        """Return the number of pages or slots of each group that are handed out."""
        return tuple(self._num_held)

    def used(self, evictable: Sequence[int]) -> int:
        """Return the bytes of the pages that are handed out, without those that the prefix cache can evict, in pages of all
        groups together, rounded up."""
        parts = zip(self._num_held, evictable, self.layout.pages, strict=True)
        slabs = sum((held - more) / pages for held, more, pages in parts)
        return math.ceil(slabs * self.num_total / (self.layout.num_slabs - 1))

    def allocatable(self, extra: Sequence[int], slots: int = 0) -> int:
        """Return the number of pages of each paged group that could be taken at least, together with ``slots`` slots of each
        state group, if ``extra[g]`` pages or slots of each group were freed before. Whatever slabs these are in, it is not
        less. -1 means that there are too few slots; without paged groups the number is not limited."""
        if self._slabs_needed(0, extra, slots) > len(self._free_slabs):
            return -1
        low, high = 0, self.num_total + max(extra)
        if not self._paged:
            return UNLIMITED
        while low < high:
            middle = (low + high + 1) // 2
            if self._slabs_needed(middle, extra, slots) <= len(self._free_slabs):
                low = middle
            else:
                high = middle - 1
        return low

    def may_suffice(self, count: int, extra: Sequence[int], slots: int = 0) -> bool:
        """Return False if ``count`` pages and ``slots`` slots cannot be taken even if ``extra[g]`` pages or slots of each group
        are freed and the slabs that become empty are as many as possible."""
        own = self.layout.pages
        emptied = sum(more // pages for more, pages in zip(extra, own, strict=True))
        return self._slabs_needed(count, extra, slots) <= len(self._free_slabs) + emptied

    def shortage(self, count: int, extra: Sequence[int], slots: int = 0) -> list[int]:
        """Return how many pages or slots of each group must be freed, at most ``extra[g]``, so that ``count`` pages and
        ``slots`` slots can be taken. There must be enough (see ``allocatable``)."""
        need, sizes = [0] * len(self._pages), self.layout.pages
        wanted = [count if paged else slots for paged in self._is_paged]
        while (excess := self._slabs_needed(count, need, slots) - len(self._free_slabs)) > 0:
            missing = [most - free - own for most, free, own in zip(wanted, self._num_free, need, strict=True)]
            left = [more - own if lack > 0 else 0 for more, own, lack in zip(extra, need, missing, strict=True)]
            group = max(range(len(need)), key=lambda g: left[g] / sizes[g])
            assert left[group] > 0, f"{excess} slabs are missing"
            need[group] += min(left[group], (missing[group] - 1) % sizes[group] + 1)
        return need

    def _slabs_needed(self, count: int, extra: Sequence[int], slots: int = 0) -> int:
        return sum(
            -(-max(0, (count if paged else slots) - free - more) // own)
            for paged, free, more, own in zip(self._is_paged, self._num_free, extra, self.layout.pages, strict=True)
        )

    def alloc(self, n: int) -> IntArray | None:
        """Take ``n`` pages of each paged group and return them as int32 ``[paged groups, n]``. Return None, and take nothing,
        if there are not enough."""
        if self._slabs_needed(n, self._nothing) > len(self._free_slabs):
            return None
        self._columns = None
        taken = np.empty((len(self._paged), n), np.int32)
        for row, group in enumerate(self._paged):
            taken[row] = self._take(group, n)
        return taken

    def alloc_slots(self) -> IntArray | None:
        """Take a slot of each state group and return them as int32 ``[state groups]``. Return None, and take nothing, if
        there are not enough."""
        if self._slabs_needed(0, self._nothing, 1) > len(self._free_slabs):
            return None
        self._columns = None
        return np.concatenate([self._take(group, 1) for group in self.layout.states])

    def postpone(self, n: int) -> None:
        """Hand out the slabs from which ``alloc(n)`` would take pages, and the slots of a request come, after all others. A
        caller that wants large numbers calls this while nothing is handed out."""
        assert not any(self._num_held), "pages are handed out"
        count = min(self._slabs_needed(n, self._nothing, 1), len(self._free_slabs))
        rest = len(self._free_slabs) - count
        self._free_slabs = self._free_slabs[rest:] + self._free_slabs[:rest]

    def _take(self, group: int, n: int) -> IntArray:
        taken: list[int] = []
        while len(taken) < n:
            slab = self._fullest(group)
            free = self._pages[group][slab]
            count = min(n - len(taken), len(free))
            taken += free[: -count - 1 : -1]
            del free[-count:]
            self._push(group, slab)
            self._num_free[group] -= count
        held = self._held[group]
        for page in taken:
            held[self._index(group, page)] = 1
        self._num_held[group] += n
        return np.array(taken, np.int32)

    def _fullest(self, group: int) -> int:
        """Return the slab of a group that has the fewest free pages, but at least one. Draws one if there is none."""
        heap, slabs = self._heaps[group], self._pages[group]
        while heap:
            count, slab = heap[0]
            if slab in slabs and len(slabs[slab]) == count:
                return slab
            heapq.heappop(heap)
        slab, count = self._free_slabs.pop(), self.layout.pages[group]
        first = slab * self.layout.blocks[group]
        slabs[slab] = list(range(first + count - 1, first - 1, -1))
        self._num_free[group] += count
        self._push(group, slab)
        return slab

    def _push(self, group: int, slab: int) -> None:
        count = len(self._pages[group][slab])
        if count:
            heapq.heappush(self._heaps[group], (count, slab))

    def free(self, pages: IntArray | Sequence[IntArray]) -> None:
        """Give back pages or slots of each group, each of which must be held. Holes (page 0) are ignored. Asserts that nothing
        is freed twice."""
        assert len(pages) == len(self._pages), f"{len(pages)} groups of pages given back, not {len(self._pages)}"
        self._columns = None
        for group, own in enumerate(pages):
            if len(own):
                self._give_back(group, own.tolist())

    def _give_back(self, group: int, pages: Sequence[int]) -> None:
        """Give back pages of one group. A request frees a few pages or a single slot at a time, for which a loop takes less time
        than operations on arrays."""
        held, blocks = self._held[group], self.layout.blocks[group]
        by_slab: dict[int, list[int]] = {}
        for page in pages:
            if page > 0:
                index = self._index(group, page)
                assert held[index], "a page was freed that is not held, or twice in one call"
                held[index] = 0
                by_slab.setdefault(page // blocks, []).append(page)
        slabs, size = self._pages[group], self.layout.pages[group]
        for slab in sorted(by_slab):
            free, own = slabs[slab], by_slab[slab]
            free += own
            self._num_held[group] -= len(own)
            self._num_free[group] += len(own)
            if len(free) == size:
                del slabs[slab]
                self._num_free[group] -= size
                self._free_slabs.append(slab)
            else:
                self._push(group, slab)

    def _index(self, group: int, page: Index) -> Index:
        """Return the index of a page in ``_held``."""
        blocks = self.layout.blocks[group]
        return page // blocks * self.layout.pages[group] + page % blocks

    def are_held(self, pages: IntArray | Sequence[IntArray]) -> bool:
        """Return True if none of the pages of each group is free. Holes are ignored."""
        held = [np.frombuffer(own, np.bool_) for own in self._held]
        return all(held[group][self._index(group, own[own > 0])].all() for group, own in enumerate(pages))

    def check_integrity(self, held: Sequence[IntArray]) -> None:
        """Assert that ``held`` are the pages of each group that are handed out, each once, that every slab has one owner, and
        that no slab without a held page is kept."""
        owned = [slab for slabs in self._pages for slab in slabs]
        assert sorted([*owned, *self._free_slabs]) == list(range(1, self.layout.num_slabs)), "a slab has not one owner"
        for group, own in enumerate(held):
            slabs, size = self._pages[group], self.layout.pages[group]
            assert len(own) == self._num_held[group] == sum(self._held[group]), "held pages are counted wrong"
            assert self.are_held([own if g == group else own[:0] for g in range(len(held))]), "a held page is free"
            assert len(np.unique(own)) == len(own), "a page is held twice"
            assert self._num_free[group] == sum(map(len, slabs.values())) == len(slabs) * size - len(own), (
                "pages are lost"
            )
            assert all(len(free) < size for free in slabs.values()), "an empty slab is kept"
