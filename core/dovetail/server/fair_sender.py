"""Send requests to an engine in turns for tenants, a limited number of each at a time."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

import msgspec

from dovetail.errors import QueueFullError
from dovetail.fair_queue import FairQueue
from dovetail.messages import GenerateMsg

AT_ONCE = 64
"""Messages that are sent before other work of the event loop gets its turn. To encode one takes some microseconds."""

AT_ONCE_SHARED = 32
PAUSE_SECONDS = 0.005
"""While several tenants send requests, a tenant whose ``AT_ONCE_SHARED``-th message was sent waits for at most this time: the engine reads
all that have arrived before its next step, and a request of another tenant would wait until it has taken thousands."""

SHARED_SECONDS = 10.0
"""How long after requests of two tenants have followed each other several tenants count as sending requests."""

Later = Callable[[float, Callable[[], None]], object]
"""A function that calls another one after some seconds, and after other work of the event loop."""


class FairSender:
    """Hold back the requests of tenants that have many, so that a request with thousands of inputs neither fills the engine's
    queue nor stops the event loop while it is sent.

    At most ``window`` requests of one tenant are in the engine, which is enough to fill its steps, and those of adapters that are unloaded or
    replaced (``send_of_adapter``). The others wait here, in turns
    for tenants, those of one tenant by priority and then by arrival. While several tenants send requests, each of them
    sends at most ``AT_ONCE_SHARED`` until all may send again, ``PAUSE_SECONDS`` after the first has sent as many. At most ``most`` wait: beyond that a request is refused,
    unless its tenant has none here or less than an equal share.
    """

    def __init__(
        self,
        send: Callable[[GenerateMsg], None],
        later: Later,
        window: int,
        most: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``send`` sends a message."""
        self._send, self._later, self._clock = send, later, clock
        self.window = window
        self._most = most
        self._last_tenant: str | None = None
        self._shared_until = 0.0
        self._serial = itertools.count()
        self.clear()

    def clear(self) -> None:
        """Forget all requests, because the engine has ended."""
        self._turns: FairQueue[None] = FairQueue()  # an item for each entry of a heap
        self._heaps: dict[str, list[tuple[int, int, deque[GenerateMsg]]]] = {}  # messages of equal priority, by it
        self._unsent: dict[str, str] = {}  # tenants by the ids of requests that wait here
        self._sent: dict[str, str] = {}  # tenants by the ids of requests that are in the engine
        self._waiting: Counter[str] = Counter()
        self._in_engine: Counter[str] = Counter()
        self._burst: Counter[str] = Counter()  # messages sent since the last pause
        self._pumping = self._pausing = False

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
        for (tenant, priority), group in itertools.groupby(msgs, key=lambda msg: (msg.tenant, msg.priority)):
            own = deque(group)
            self._unsent.update(dict.fromkeys([msg.rid for msg in own], tenant))
            self._waiting[tenant] += len(own)
            heapq.heappush(self._heaps.setdefault(tenant, []), (-priority, next(self._serial), own))
            self._turns.put(tenant, *([None] * len(own)))
            self._note(tenant)
        if not self._pumping:
            self._pump()

    def _note(self, tenant: str) -> None:
        """Note that ``tenant`` has sent requests."""
        if self._last_tenant not in (None, tenant):
            self._shared_until = self._clock() + SHARED_SECONDS
        self._last_tenant = tenant

    def drop(self, rid: str) -> bool:
        """Drop a request that was not sent. Return False if it was."""
        tenant = self._unsent.pop(rid, None)
        if tenant is not None:
            _subtract_one(self._waiting, tenant)
        return tenant is not None

    def send_of_adapter(self, name: str) -> None:
        """Send all requests that wait here for the adapter ``name``, whatever their turn and the engine's limits: it is about to be
        unloaded or replaced, and those that were accepted keep it. Other work of the event loop waits meanwhile, so that nothing comes between
        them and the command that follows (8,192 requests: about 20 ms with prompts of 100 tokens, 130 with 4,000)."""
        if not self._unsent:
            return
        waiting = [msg for heap in self._heaps.values() for _, _, msgs in sorted(heap) for msg in msgs]
        for msg in waiting:
            if msg.adapter == name and (tenant := self._unsent.get(msg.rid)) is not None:
                self.drop(msg.rid)  # its turn is skipped later
                self._send_now(msgspec.structs.replace(msg, accepted=True), tenant)

    def _send_now(self, msg: GenerateMsg, tenant: str) -> None:
        self._turns.charge(tenant, 1 / msg.weight)
        self._sent[msg.rid] = tenant
        self._in_engine[tenant] += 1
        self._send(msg)

    def finished(self, rid: str) -> None:
        """Note that a request is no longer in the engine."""
        tenant = self._sent.pop(rid, None)
        if tenant is not None:
            _subtract_one(self._in_engine, tenant)
            if self._unsent and not self._pumping:
                self._pump()

    def _pump(self) -> None:
        self._pumping = False
        shared = self._shared_until > 0 and self._clock() < self._shared_until
        for _ in range(AT_ONCE):
            full = {tenant for tenant, count in self._in_engine.items() if count >= self.window}
            if shared:
                full.update(tenant for tenant, count in self._burst.items() if count >= AT_ONCE_SHARED)
            tenant = self._turns.next_tenant(skip=full)
            if tenant is None:
                return
            self._turns.take(tenant, 0.0)
            msg = self._pop(tenant)
            if self.drop(msg.rid):  # otherwise it was dropped before
                if shared:
                    self._count(tenant)
                self._send_now(msg, tenant)
        if len(self._turns):
            self._pumping = True
            self._later(0.0, self._pump)

    def _pop(self, tenant: str) -> GenerateMsg:
        """Remove and return the message of ``tenant`` that is sent next."""
        heap = self._heaps[tenant]
        msgs = heap[0][2]
        msg = msgs.popleft()
        if not msgs:
            heapq.heappop(heap)
        if not heap:
            del self._heaps[tenant]
        return msg

    def _count(self, tenant: str) -> None:
        """Count a message of ``tenant``, and let all send again in ``PAUSE_SECONDS`` if these are enough."""
        self._burst[tenant] += 1
        if self._burst[tenant] >= AT_ONCE_SHARED and not self._pausing:
            self._pausing = True
            self._later(PAUSE_SECONDS, self._resume)

    def _resume(self) -> None:
        """Let tenants send messages again."""
        self._pausing = False
        self._burst.clear()
        if self._unsent and not self._pumping:
            self._pump()


def _subtract_one(counts: Counter[str], tenant: str) -> None:
    counts[tenant] -= 1
    if not counts[tenant]:
        del counts[tenant]
