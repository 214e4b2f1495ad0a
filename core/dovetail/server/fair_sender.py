"""Send requests to an engine in turns for tenants, a limited number of each at a time."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Sequence

from dovetail.errors import QueueFullError
from dovetail.fair_queue import FairQueue
from dovetail.messages import GenerateMsg

AT_ONCE = 64
"""Messages that are sent before other work of the event loop gets its turn. To encode one takes some microseconds."""


class FairSender:
    """Hold back the requests of tenants that have many, so that a request with thousands of inputs neither fills the engine's
    queue nor stops the event loop while it is sent.

    At most ``window`` requests of one tenant are in the engine, which is enough to fill its steps. The others wait here, in turns
    for tenants, those of one tenant by priority and then by arrival. At most ``most`` wait: beyond that a request is refused,
    unless its tenant has none here or less than an equal share.
    """

    def __init__(
        self,
        send: Callable[[GenerateMsg], None],
        later: Callable[[Callable[[], None]], object],
        window: int,
        most: int,
    ) -> None:
        """``send`` sends a message; ``later`` calls a function after other work of the event loop."""
        self._send, self._later = send, later
        self._window, self._most = window, most
        self._serial = itertools.count()
        self.clear()

    def clear(self) -> None:
        """Forget all requests, because the engine has ended."""
        self._turns: FairQueue[None] = FairQueue()  # an item for each entry of a heap
        self._heaps: dict[str, list[tuple[int, int, GenerateMsg]]] = {}
        self._unsent: dict[str, str] = {}  # tenants by the ids of requests that wait here
        self._sent: dict[str, str] = {}  # tenants by the ids of requests that are in the engine
        self._waiting: Counter[str] = Counter()
        self._in_engine: Counter[str] = Counter()
        self._pumping = False

    def __len__(self) -> int:
        return len(self._unsent)

    @property
    def unsent(self) -> list[str]:
        """Return the ids of the requests that wait here."""
        return list(self._unsent)

    def check(self, tenant: str, count: int) -> None:
        """Raise ``QueueFullError`` if ``count`` more messages of ``tenant`` may not wait."""
        own = self._waiting.get(tenant, 0)
        if own and len(self._unsent) + count > self._most and own + count > self._most / len(self._waiting):
            raise QueueFullError(
                f"{len(self._unsent)} requests wait to be sent to the engine, {own} of them of this client; allowed: "
                f"{self._most} (scheduler.max_waiting); retry later"
            )

    def put(self, msgs: Sequence[GenerateMsg]) -> None:
        """Send requests as soon as it is their turn."""
        for tenant, group in itertools.groupby(msgs, key=lambda msg: msg.tenant):
            own = list(group)
            self._unsent.update(dict.fromkeys([msg.rid for msg in own], tenant))
            self._waiting[tenant] += len(own)
            heap = self._heaps.setdefault(tenant, [])
            for msg in own:
                heapq.heappush(heap, (-msg.priority, next(self._serial), msg))
            self._turns.put(tenant, *([None] * len(own)))
        if not self._pumping:
            self._pump()

    def drop(self, rid: str) -> bool:
        """Drop a request that was not sent. Return False if it was."""
        tenant = self._unsent.pop(rid, None)
        if tenant is not None:
            _subtract_one(self._waiting, tenant)
        return tenant is not None

    def finished(self, rid: str) -> None:
        """Note that a request is no longer in the engine."""
        tenant = self._sent.pop(rid, None)
        if tenant is not None:
            _subtract_one(self._in_engine, tenant)
            if self._unsent and not self._pumping:
                self._pump()

    def _pump(self) -> None:
        self._pumping = False
        for _ in range(AT_ONCE):
            full = [tenant for tenant, count in self._in_engine.items() if count >= self._window]
            tenant = self._turns.next_tenant(skip=full)
            if tenant is None:
                return
            self._turns.take(tenant, 0.0)
            heap = self._heaps[tenant]
            msg = heapq.heappop(heap)[2]
            if not heap:
                del self._heaps[tenant]
            if self.drop(msg.rid):  # otherwise it was dropped before
                self._turns.charge(tenant, 1 / msg.weight)
                self._sent[msg.rid] = tenant
                self._in_engine[tenant] += 1
                self._send(msg)
        if len(self._turns):
            self._pumping = True
            self._later(self._pump)


def _subtract_one(counts: Counter[str], tenant: str) -> None:
    counts[tenant] -= 1
    if not counts[tenant]:
        del counts[tenant]
