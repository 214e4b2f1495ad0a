"""Let tenants take turns: a queue that serves them by what each has been served already, weighted."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Collection
from typing import Generic, TypeVar

T = TypeVar("T")

_MOST_TIMES = 4096
"""Keep the virtual times of about this number of tenants. Beyond it, the present is the median of them."""


class FairQueue(Generic[T]):
    """Queue items of tenants by start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). Not thread-safe.

    Every tenant has a virtual time, which advances by the cost of its items divided by its weight. The tenant with the
    smallest virtual time is served next, the items of one tenant in their order. A tenant that returns starts at the
    present virtual time: it gains nothing by having been away.
    """

    def __init__(self) -> None:
        self._queues: dict[str, deque[T]] = {}
        self._times: dict[str, float] = {}
        self._now = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __contains__(self, tenant: str) -> bool:
        return tenant in self._queues

    @property
    def num_tenants(self) -> int:
        """Return the number of tenants that have items."""
        return len(self._queues)

    def length(self, tenant: str) -> int:
        """Return the number of items of a tenant."""
        return len(self._queues.get(tenant, ()))

    def put(self, tenant: str, *items: T) -> None:
        """Add items."""
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = deque()
            self._forget()
            self._times[tenant] = max(self._times.get(tenant, 0.0), self._now)
        queue.extend(items)

    def next_tenant(self, skip: Collection[str] = ()) -> str | None:
        """Return the tenant whose turn it is; None if there are no items but those of tenants in ``skip``."""
        best, least = None, math.inf
        for tenant in self._queues:
            if self._times[tenant] < least and tenant not in skip:
                best, least = tenant, self._times[tenant]
        return best

    def take(self, tenant: str, cost: float = 1.0) -> T:
        """Remove and return the oldest item of ``tenant``, and charge it ``cost``, already divided by its weight."""
        queue = self._queues[tenant]
        item = queue.popleft()
        if not queue:
            del self._queues[tenant]
        self._now = max(self._now, self._times[tenant])
        self.charge(tenant, cost)
        return item

    def charge(self, tenant: str, cost: float) -> None:
        """Advance the virtual time of a tenant, for example when the cost of an item is known."""
        self._times[tenant] = max(self._times.get(tenant, 0.0), self._now) + cost
        if len(self._times) > _MOST_TIMES + 2 * len(self._queues):
            self._now = max(self._now, sorted(self._times.values())[len(self._times) // 2])
            self._forget()

    def _forget(self) -> None:
        """Forget the virtual times of tenants that would gain nothing by them."""
        self._times = {name: time for name, time in self._times.items() if name in self._queues or time > self._now}

    def remove(self, tenant: str, item: T) -> bool:
        """Remove an item that is no longer wanted. Return False if it was taken already."""
        queue = self._queues.get(tenant, deque())
        try:
            queue.remove(item)
        except ValueError:
            return False
        if not queue:
            del self._queues[tenant]
        return True


class FairSlots(Generic[T]):
    """Decide which waiting items may run: ``slots`` at the same time, and one more of a tenant that has none running.

    The tenants of waiting items take turns. The additional slot is what keeps a tenant with much slow work from delaying
    others; while there is a single tenant it is never used. Not thread-safe.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._waiting: FairQueue[T] = FairQueue()
        self._running: Counter[str] = Counter()

    def put(self, tenant: str, item: T) -> None:
        """Add a waiting item."""
        self._waiting.put(tenant, item)

    def remove(self, tenant: str, item: T) -> None:
        """Remove an item that waits no longer."""
        self._waiting.remove(tenant, item)

    @property
    def idle(self) -> bool:
        """Return True if nothing runs and nothing waits."""
        return not self._running and not self._waiting.num_tenants

    def start(self, tenant: str) -> None:
        """Count an item of ``tenant`` as running that was never put, which is allowed while this is ``idle``."""
        assert self.idle, "items that wait go first"
        self._running[tenant] += 1

    def others_wait(self, tenant: str) -> bool:
        """Return True if items of tenants other than ``tenant`` wait."""
        return self._waiting.num_tenants > (tenant in self._waiting)

    def start_next(self) -> tuple[str, T] | None:
        """Return a waiting item that may run now, with its tenant, and count it as running; None if there is none. The caller
        must report its end to ``ended``."""
        running = self._running.total()
        if running > self._slots:
            return None
        tenant = self._waiting.next_tenant(skip=() if running < self._slots else self._running)
        if tenant is None:
            return None
        self._running[tenant] += 1
        return tenant, self._waiting.take(tenant, 0.0)

    def ended(self, tenant: str, cost: float) -> None:
        """Report that an item of ``tenant`` has ended, and charge what it has cost, divided by the tenant's weight."""
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        if cost:
            self._waiting.charge(tenant, cost)


class FairTurns:
    """Let tasks of tenants take turns, as ``FairSlots`` decides. An object belongs to one event loop."""

    def __init__(self, slots: int) -> None:
        self._slots: FairSlots[asyncio.Future[None]] = FairSlots(slots)

    def others_wait(self, tenant: str) -> bool:
        """Return True if tasks of other tenants wait for their turn."""
        return self._slots.others_wait(tenant)

    @property
    def idle(self) -> bool:
        """Return True if no task has its turn and none waits."""
        return self._slots.idle

    def begin_at_once(self, tenant: str) -> None:
        """Begin the turn of a task, which must ``end`` it, while this is ``idle``."""
        self._slots.start(tenant)

    async def begin(self, tenant: str) -> None:
        """Wait for the turn of a task, which must ``end`` it."""
        turn = asyncio.get_running_loop().create_future()
        self._slots.put(tenant, turn)
        self._start()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._slots.remove(tenant, turn)
            else:  # its turn had come
                self.end(tenant, 0.0)
            raise

    def end(self, tenant: str, cost: float) -> None:
        """End a turn, which has cost ``cost``, divided by the tenant's weight."""
        self._slots.ended(tenant, cost)
        self._start()

    def _start(self) -> None:
        while (found := self._slots.start_next()) is not None:
            tenant, turn = found
            if turn.done():
                self._slots.ended(tenant, 0.0)
            else:
                turn.set_result(None)
