"""Pin cached prefixes that the client has announced to use again, in the next members of a group or in the next request
of a session. Pins are hints: when pages are needed for anything else, the scheduler releases pins, the oldest first.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from dovetail.interfaces.cache import Match
    from dovetail.memory.ledger import PageLedger
    from dovetail.scheduler.limits import SchedulerLimits, Totals
    from dovetail.types import IntArray, Req

Clock = Callable[[], float]
"""Return a time in seconds that never decreases."""


class PinKey(NamedTuple):
    """Identify the group or session that a prefix is pinned for. ``kind`` is ``group`` or ``session``; ``name`` is
    unique in its namespace."""

    kind: str
    namespace: str
    name: str


@dataclass(slots=True)
class _Pin:
    handle: Any  # the prefix cache's handle, locked
    held: list[IntArray]  # the pages, or the snapshot, of each cache group
    deadline: float


class Pins:
    """Lock paths of the prefix cache. All pins together hold at most ``limits.pin_pages`` pages, and each expires
    ``limits.pin_seconds`` after it was taken or renewed. With a cache that keeps nothing, nothing is pinned.

    Pages are those of the first group with pages. Models that keep states only have snapshots instead."""

    def __init__(
        self, limits: SchedulerLimits, ledger: PageLedger, totals: Totals, clock: Clock = time.monotonic
    ) -> None:
        self.clock, self.members = clock, (self,)
        self.pages = 0  # the number of pages that at least one pin holds
        self._seconds, self._bound = limits.pin_seconds, limits.pin_pages
        self._cache, self._allocator, self._table, self._totals = ledger.cache, ledger.allocator, ledger.table, totals
        self._pins: OrderedDict[PinKey, _Pin] = OrderedDict()  # in the order in which they expire
        self._paged, self._num_groups = ledger.paged, len(ledger.allocator.num_held)
        self._lead, self._states = ledger.paged[0] if ledger.paged else 0, ledger.states
        self._holders = np.zeros(
            ledger.allocator.max_page + 1, np.int32
        )  # [pages] the number of pins that hold each page

    def __contains__(self, key: PinKey) -> bool:
        return key in self._pins

    def keep(self, key: PinKey, tokens: IntArray) -> None:
        """Pin the cached prefix of ``tokens`` for ``key``, in place of the earlier pin of ``key``. Older pins are
        released if the limit requires it. If the prefix alone exceeds the limit, nothing is pinned."""
        if self._bound == 0 or self._seconds == 0:
            return
        match = self._cache.match(tokens, key.namespace)
        self._cache.lock(match.handle)  # before the release, which may unlock the same pages
        self.release(key)
        held = self._held_by(match)
        pages = held[self._lead]
        if len(pages) == 0 or not self._fits(pages):
            self._totals.pins_dropped += len(pages) > 0
            self._cache.unlock(match.handle)
            return
        self.pages += self._unheld(pages)
        self._holders[pages] += 1
        self._pins[key] = _Pin(match.handle, held, self.clock() + self._seconds)
        self._totals.pins_taken += 1

    def cached(self, key: PinKey, tokens: IntArray) -> int:
        """Return the number of ``tokens`` that the cache has for ``key``."""
        return self._cache.match(tokens, key.namespace).length

    def renew(self, key: PinKey) -> None:
        """Extend the pin of ``key``, if there is one, as if it were taken now."""
        pin = self._pins.get(key)
        if pin is not None:
            pin.deadline = self.clock() + self._seconds
            self._pins.move_to_end(key)

    def release(self, key: PinKey) -> None:
        """Release the pin of ``key``, if there is one."""
        pin = self._pins.pop(key, None)
        if pin is not None:
            pages = pin.held[self._lead]
            self._holders[pages] -= 1
            self.pages -= self._unheld(pages)
            self._cache.unlock(pin.handle)

    def clear(self) -> None:
        """Release all pins."""
        for key in list(self._pins):
            self.release(key)

    def expire(self) -> None:
        """Release the pins whose deadline has passed."""
        while self._pins:
            key, pin = next(iter(self._pins.items()))
            if pin.deadline > self.clock():
                return
            self.release(key)
            self._totals.pins_expired += 1

    def release_pinned(self, short: int) -> bool:
        """Release the oldest pin because ``short`` pages are missing for something else. If there is none, or all pins
        together hold fewer than ``short`` pages, release nothing and return False. Of models with states, slots may be
        missing instead."""
        if not self._pins or (self._states is None and short > self.pages):
            return False
        self._drop_oldest()
        return True

    def count_unread(self, running: Iterable[Req]) -> list[int]:
        """Return the number of pinned pages of each group that no running request reads, and of pinned snapshots. If there
        are pins, this takes time linear in the size of the pool and in the number of shared pages of ``running``."""
        counts = [0] * self._num_groups
        if not self._pins:
            return counts
        read = [self._table.pages[:, req.slot, : req.shared_pages] for req in running]
        rows = {group: row for row, group in enumerate(self._paged)}
        for group in range(self._num_groups):
            if group == self._lead and group in rows:
                held = self._holders > 0
                for row in read:
                    held[row[rows[group]]] = False
                counts[group] = int(np.count_nonzero(held))
                continue
            pinned = np.concatenate([pin.held[group] for pin in self._pins.values()])
            mine = [row[rows[group]] for row in read] if group in rows else []
            counts[group] = len(np.setdiff1d(pinned, np.concatenate(mine) if mine else []))
        return counts

    def _held_by(self, match: Match) -> list[IntArray]:
        """Return the pages or the snapshot of each group that a match holds."""
        states = match.states if match.states is not None else np.zeros(0, np.int32)
        held = [states[:0]] * self._num_groups
        others = [group for group in range(self._num_groups) if group not in self._paged]
        for group, own in (*zip(self._paged, match.pages, strict=True), *zip(others, states[:, None], strict=True)):
            held[group] = own[own > 0]
        return held

    def _fits(self, pages: IntArray) -> bool:
        """Release older pins until ``pages`` fit within the bound. If they never fit, release nothing and return
        False."""
        if len(pages) > self._bound:
            return False
        while self.pages + self._unheld(pages) > self._bound:
            self._drop_oldest()
        return True

    def _drop_oldest(self) -> None:
        self.release(next(iter(self._pins)))
        self._totals.pins_dropped += 1

    def _unheld(self, pages: IntArray) -> int:
        return len(pages) - int(np.count_nonzero(self._holders[pages]))

    def check_integrity(self) -> None:
        """Assert that pinned pages are in the cache, locked, and counted right. Takes time linear in the pool's
        size."""
        holders = np.zeros_like(self._holders)
        for pin in self._pins.values():
            assert self._allocator.are_held(pin.held), "a pinned page is free"
            holders[pin.held[self._lead]] += 1
        assert (holders == self._holders).all(), "pins are counted wrong"
        assert self.pages == np.count_nonzero(holders) <= self._bound, "pinned pages are counted wrong"
        locked = self._cache.total[self._lead] - self._cache.evictable[self._lead]
        assert self.pages <= locked, "a pinned page can be evicted"
