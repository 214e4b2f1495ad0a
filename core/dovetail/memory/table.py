"""Keep the request table: a slot for every running request, and the row of the page table that belongs to it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from dovetail.types import IntArray, PageUpdates

PADDING_SLOT = 0

Slots = TypeVar("Slots", int, IntArray)


def pool_of(slots: Slots, num_pools: int) -> Slots:
    """Return the pool to which slots of requests belong. With data-parallel attention each rank has a pool, and the number of
    a pool is that of its rank. The pools divide the slots evenly."""
    return (slots - 1) % num_pools


class RequestTable:
    """Keep the slots of running requests and their page tables, on the host.

    ``pages`` is int32 ``[groups, slots, max_pages]``, the memory that the constructor was given. Every change is also
    recorded, so that ``take_updates`` can return the difference since the last step, which the engine sends to the
    device. Slot 0 belongs to padding rows. If several ranks have pools of their own, every slot belongs to one of them
    (``pool_of``).
    """

    def __init__(self, pages: IntArray, num_pools: int = 1) -> None:
        self.pages = pages
        self._num_pools = num_pools
        self._free: list[list[int]] = [[] for _ in range(num_pools)]
        for slot in range(pages.shape[1] - 1, PADDING_SLOT, -1):
            self.free_slot(slot)
        self._updates: list[PageUpdates] = []
        self._runs: list[_Run] = []  # written after ``_updates``
        self._versions = itertools.count(1)

    @property
    def num_free(self) -> int:
        """Return the number of slots that ``take_slot`` can still return, of all pools."""
        return sum(map(len, self._free))

    def num_free_of(self, pool: int) -> int:
        """Return the number of slots of ``pool`` that ``take_slot`` can still return."""
        return len(self._free[pool])

    def take_slot(self, pool: int = 0) -> int:
        """Return a free slot of ``pool``. There must be one."""
        return self._free[pool].pop()

    def free_slot(self, slot: int) -> None:
        """Return a slot to the free slots. From now on the content of its row in the page table is undefined."""
        self._free[pool_of(slot, self._num_pools)].append(slot)

    def write(self, slot: int, column: int, pages: IntArray) -> None:
        """Set ``pages [groups, n]`` in a slot's row, from ``column`` on. The caller must not change ``pages``
        afterwards."""
        self.pages[:, slot, column : column + pages.shape[1]] = pages
        self._runs.append(_Run(slot, column, pages))

    def write_each(self, slots: Sequence[int], columns: Sequence[int], pages: IntArray) -> None:
        """Set ``pages [groups, n]`` at ``columns [n]`` of the rows of ``slots [n]``."""
        version = next(self._versions)
        update = PageUpdates(np.array(slots, np.int32), np.array(columns, np.int32), pages, version)
        self.pages[:, update.slots, update.columns] = pages
        self._expand_runs()
        self._updates.append(update)

    def take_updates(self) -> PageUpdates:
        """Return all entries written since the last call, in the order in which they were written."""
        updates, self._updates = self.next_updates(), []
        return updates

    def next_updates(self) -> PageUpdates:
        """Return the object that ``take_updates`` will return, unless something is written before that call."""
        self._expand_runs()
        if not self._updates:
            return _NO_UPDATES
        if len(self._updates) > 1:
            slots, columns, pages, _ = zip(*self._updates, strict=True)
            joined = np.concatenate(slots), np.concatenate(columns), np.concatenate(pages, axis=1)
            self._updates = [PageUpdates(*joined, next(self._versions))]
        return self._updates[0]

    def put_back(self, updates: PageUpdates) -> None:
        """Insert ``updates``, which may not have reached the device, before everything written since. The next
        ``take_updates`` returns them again."""
        if len(updates.slots):
            self._updates.insert(0, updates)

    def _expand_runs(self) -> None:
        if self._runs:
            self._updates.append(PageUpdates(*_expanded(self._runs), next(self._versions)))
            self._runs = []


class _Run(NamedTuple):
    """Hold consecutive entries of one row."""

    slot: int
    column: int
    pages: IntArray  # [groups, n]


def _expanded(runs: Sequence[_Run]) -> tuple[IntArray, IntArray, IntArray]:
    """Return slots, columns and pages with one entry for each page of ``runs``."""
    if len(runs) == 1:
        ((slot, column, pages),) = runs
        count = pages.shape[1]
        return np.full(count, slot, np.int32), np.arange(column, column + count, dtype=np.int32), pages
    slots, columns, pages = zip(*runs, strict=True)
    counts = np.array([run.shape[1] for run in pages], np.int32)
    ends = np.cumsum(counts, dtype=np.int32)
    shifts = np.array(columns, np.int32) - (ends - counts)  # a page's column minus its index in the result
    places = np.arange(ends[-1], dtype=np.int32)
    places += np.repeat(shifts, counts)
    return np.repeat(np.array(slots, np.int32), counts), places, np.concatenate(pages, axis=1)


_NO_UPDATES = PageUpdates(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros((1, 0), np.int32))
