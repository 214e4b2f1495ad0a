"""Prefixes that stay in the cache because somebody has said that they will be wanted: a group's next members, a session's
next turn. A hint and no more: where pages are needed for anything else the pins give way, the oldest first.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from dovetail.memory.ledger import PageLedger
    from dovetail.scheduler.limits import SchedulerLimits, Totals
    from dovetail.types import IntArray, Req

Clock = Callable[[], float]
"""Seconds that never go back."""


class PinKey(NamedTuple):
    """Whose prefix it is: a ``group`` or a ``session``, by its name in its namespace."""

    kind: str
    namespace: str
    name: str


@dataclass(slots=True)
class _Pin:
    handle: Any  # locked
    pages: IntArray  # [n] of the first cache group: they say which
    deadline: float


class Pins:
    """Locks on paths of the prefix cache, ``limits.pin_pages`` of its pages at most, each for ``limits.pin_seconds`` since it was
    taken or renewed. A cache that keeps nothing has nothing to pin."""

    def __init__(
        self, limits: SchedulerLimits, ledger: PageLedger, totals: Totals, clock: Clock = time.monotonic
    ) -> None:
        self.clock = clock
        self.pages = 0  # that one pin or more holds
        self._seconds, self._bound = limits.pin_seconds, limits.pin_pages
        self._cache, self._allocator, self._table, self._totals = ledger.cache, ledger.allocator, ledger.table, totals
        self._pins: OrderedDict[PinKey, _Pin] = OrderedDict()  # the one to expire first comes first
        self._holders = np.zeros(ledger.allocator.num_total + 1, np.int32)  # of each page, the pins

    def __contains__(self, key: PinKey) -> bool:
        return key in self._pins

    def keep(self, key: PinKey, tokens: IntArray) -> None:
        """Hold what the cache has of ``tokens``, in place of what ``key`` has held. Nothing where the bound forbids it."""
        if self._bound == 0 or self._seconds == 0:
            return
        match = self._cache.match(tokens, key.namespace)
        self._cache.lock(match.handle)  # first: it may be part of what is released
        self.release(key)
        pages = match.pages[0]
        if len(pages) == 0 or not self._fits(pages):
            self._totals.pins_dropped += len(pages) > 0
            self._cache.unlock(match.handle)
            return
        self.pages += self._unheld(pages)
        self._holders[pages] += 1
        self._pins[key] = _Pin(match.handle, pages, self.clock() + self._seconds)
        self._totals.pins_taken += 1

    def renew(self, key: PinKey) -> None:
        """Hold it as long as if it were taken now, if it is held."""
        pin = self._pins.get(key)
        if pin is not None:
            pin.deadline = self.clock() + self._seconds
            self._pins.move_to_end(key)

    def release(self, key: PinKey) -> None:
        """Let go of it, if it is held."""
        pin = self._pins.pop(key, None)
        if pin is not None:
            self._holders[pin.pages] -= 1
            self.pages -= self._unheld(pin.pages)
            self._cache.unlock(pin.handle)

    def clear(self) -> None:
        """Let go of all."""
        for key in list(self._pins):
            self.release(key)

    def expire(self) -> None:
        """Let go of those whose time has passed."""
        while self._pins:
            key, pin = next(iter(self._pins.items()))
            if pin.deadline > self.clock():
                return
            self.release(key)
            self._totals.pins_expired += 1

    def release_pinned(self, short: int) -> bool:
        """``short`` pages are missing for something else: let go of the oldest pin. False if all of them together would not be
        enough; then nothing is let go of."""
        if short > self.pages:
            return False
        self._drop_oldest()
        return True

    def count_unread(self, running: Iterable[Req]) -> int:
        """Pinned pages that no running request reads. Linear in the pool and in the pages that are shared, where there are pins."""
        if not self.pages:
            return 0
        held = self._holders > 0
        for req in running:
            held[self._table.pages[0, req.slot, : req.shared_pages]] = False
        return int(np.count_nonzero(held))

    def _fits(self, pages: IntArray) -> bool:
        """Let go of older pins until ``pages`` fit within the bound; of none if they never will."""
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
        """Assert that what is pinned is in the cache and locked, and counted right. Linear in the pool."""
        holders = np.zeros_like(self._holders)
        for pin in self._pins.values():
            assert self._allocator.are_held(pin.pages[None]), "a pinned page is free"
            holders[pin.pages] += 1
        assert (holders == self._holders).all(), "pins are counted wrong"
        assert self.pages == np.count_nonzero(holders) <= self._bound, "pinned pages are counted wrong"
        assert self.pages <= self._cache.total_pages - self._cache.evictable_pages, "a pinned page can be evicted"
