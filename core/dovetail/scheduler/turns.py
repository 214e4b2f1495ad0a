"""Let the tenants of a server take turns when requests are admitted."""

from __future__ import annotations

import heapq
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.scheduler.limits import SchedulerLimits
    from dovetail.types import Req

RECENT_SECONDS = 60.0
"""While a second tenant has sent a request within this time, no tenant may use all slots."""

CONTENDED_SECONDS = 10.0
"""While a second tenant has sent a request within this time, steps have fewer prompt tokens."""

LEAST_TOKENS = 64
"""The prompt tokens that a step may always have."""

MANY_RATIO = 4
"""A tenant has many requests if it has at least this many times the waiting requests of another tenant."""

_RESERVED = 8
"""The part of the slots, one of this number, that a tenant leaves to others."""


class StepBudget:
    """Choose how many prompt tokens a step has while several tenants send requests: a new request waits for the step that is
    computed, whichever tokens it has.

    The number follows the time that steps take, between a thirty-second (at least ``LEAST_TOKENS``) and a quarter of
    ``chunk_size``. Only steps that have all the tokens that they may have, and are followed by another, are measured.
    """

    def __init__(self, chunk_size: int, seconds: float) -> None:
        """``seconds`` is the time that steps approach."""
        self._seconds = seconds
        self._least = min(chunk_size, max(chunk_size // 32, LEAST_TOKENS))
        self._most = max(chunk_size // 4, self._least)
        self._tokens = float(self._least)
        self._filled: tuple[int, float] | None = None  # the tokens of the last step, and when it was chosen

    def tokens(self, now: float) -> int:
        """Return the number of tokens for a step that is chosen at the time ``now``."""
        if self._filled is not None:
            tokens, begin = self._filled
            wanted = tokens * self._seconds / max(now - begin, 1e-6)
            wanted = min(max(wanted, 0.5 * self._tokens), 1.25 * self._tokens)
            self._tokens = min(max(wanted, self._least), self._most)
            self._filled = None
        return int(self._tokens)

    def chosen(self, tokens: int, now: float) -> None:
        """Note that the step has ``tokens``."""
        if tokens >= int(self._tokens):
            self._filled = tokens, now


class TenantTurns:
    """Order requests so that tenants take turns, and keep slots free for tenants that have none. With one tenant it changes
    nothing.

    While steps have fewer prompt tokens because several tenants send requests, those of a tenant that has few waiting, and
    that runs no more than its part of the slots, go before those of tenants that have many (``MANY_RATIO``). A tenant with
    many that had prompts in the last step is held: the next step admits the prompts of tenants with few alone, so that they do
    not take the time of a full step. They may have twice as many prompt tokens as a step has otherwise, and in a step in which no
    tenant is held, tenants with many get at least half as many. A tenant that was held is not held in the next step, unless a prompt of it that began earlier
    continued meanwhile. A step that can admit nothing else admits requests of held tenants."""

    def __init__(self, limits: SchedulerLimits, by_priority: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """If ``by_priority``, the policy orders by priority, and turns are taken among requests of equal priority only."""
        most = limits.max_running
        self._slots = most
        self._most = most - max(most // _RESERVED, 1) if most > 1 else 1
        self._chunk_size = limits.chunk_size
        seconds = limits.tenants_step_seconds
        self._step = StepBudget(limits.chunk_size, seconds) if seconds else None
        self._by_priority = by_priority
        self._clock = clock
        self._seen: dict[str, float] = {}
        self._last: frozenset[str] = frozenset()
        self._held: frozenset[str] = frozenset()
        self._few: frozenset[str] = frozenset()

    def arrived(self, tenant: str) -> None:
        """Note that a tenant has sent a request."""
        self._seen[tenant] = self._clock()

    def order(self, ordered: list[Req], running: Sequence[Req]) -> Iterable[Req]:
        """Return ``ordered`` such that a tenant with fewer requests running or before goes first. The requests of one tenant
        keep their order, and so do the priorities at each place if the policy orders by priority. What is not read of the
        result costs little: a step admits a few of thousands."""
        self._held = self._few = frozenset()
        if len(self._seen) < 2:
            return ordered
        queues: dict[str, list[Req]] = defaultdict(list)
        for req in ordered:
            queues[req.tenant].append(req)
        self._remember(set(queues))
        counts = Counter(req.tenant for req in running)
        self._compare({tenant: len(queue) for tenant, queue in queues.items()}, counts)
        if not self._by_priority:
            return _merged(queues, counts, self._few)
        ranked: dict[int, dict[str, list[Req]]] = defaultdict(lambda: defaultdict(list))
        for req in ordered:
            ranked[req.priority][req.tenant].append(req)
        turns = {one: _merged(queues, counts, self._few) for one, queues in ranked.items()}
        return (next(turns[req.priority]) for req in ordered)

    def take_held(self) -> frozenset[str]:
        """Return the tenants that are held, as of the last call of ``order``, and hold them no longer."""
        held, self._held = self._held, frozenset()
        return held

    @property
    def few(self) -> frozenset[str]:
        """Return the tenants with few requests, which go before others, as of the last call of ``order``."""
        return self._few

    @property
    def contended(self) -> bool:
        """Return True if several tenants have sent requests within ``CONTENDED_SECONDS``."""
        if len(self._seen) < 2:
            return False
        recent = self._clock() - CONTENDED_SECONDS
        return sum(at > recent for at in self._seen.values()) > 1

    def budget(self) -> int:
        """Return how many prompt tokens may enter a step."""
        step = self._step
        return self._chunk_size if step is None or not self.contended else step.tokens(self._clock())

    def chosen(self, rows: Sequence[tuple[Req, int]], waiting: Sequence[Req]) -> None:
        """Note the tenants of a step's prompts, and their tokens if more are left for the next one."""
        step = self._step
        if len(self._seen) > 1:
            self._last = frozenset(req.tenant for req, _ in rows)
        if step is not None and self.contended and (waiting or any(req.extend_len > count for req, count in rows)):
            step.chosen(sum(count for _, count in rows), self._clock())

    def may_run(self, req: Req, prefilling: Sequence[Req], decoding: Sequence[Req]) -> bool:
        """Return False if the tenant of ``req`` runs as many requests as it may while other tenants send some."""
        if len(self._seen) < 2 or len(prefilling) + len(decoding) < self._most:
            return True
        return sum(other.tenant == req.tenant for other in chain(prefilling, decoding)) < self._most

    def divide(self, budget: int, waiting: Sequence[Req], prefilling: Sequence[Req]) -> list[tuple[Req, int]]:
        """Return how many prompt tokens of each prompt that has begun enter the next step, at most ``budget`` in all.

        Prompts continue in their order. If there are several tenants, each gets an equal part of the budget first, and a part is
        left over if another one waits, so that long prompts of one tenant do not delay the others.
        """
        begun = [req for req in prefilling if req.cached_len < req.device_len]
        tenants = {req.tenant for req in begun}
        waits = bool(tenants) and any(req.tenant not in tenants and req.ticket is None for req in waiting)
        given = dict.fromkeys((req.uid for req in begun), 0)
        if len(tenants) + waits > 1:
            part = budget // (len(tenants) + waits)
            for tenant in tenants:
                _give(given, (req for req in begun if req.tenant == tenant), part)
            budget -= part * waits
        _give(given, begun, budget - sum(given.values()))
        return [(req, given[req.uid]) for req in begun if given[req.uid]]

    def _compare(self, waiting: Mapping[str, int], running: Mapping[str, int]) -> None:
        """Find the tenants that have few requests and those to hold, given the numbers of all tenants."""
        if self._step is None or len(waiting) < 2 or not self.contended:
            return
        part, most = self._slots // len(waiting), max(waiting.values()) // MANY_RATIO
        few = {tenant: count for tenant, count in waiting.items() if count <= most and running.get(tenant, 0) < part}
        self._few = frozenset(few)
        if few:
            many = MANY_RATIO * min(few.values())
            self._held = frozenset(one for one in self._last - self._few if waiting.get(one, 0) >= many)

    def _remember(self, tenants: set[str]) -> None:
        """Keep ``tenants``, which wait, and those that have sent a request within ``RECENT_SECONDS``."""
        now = self._clock()
        self._seen = {tenant: at for tenant, at in self._seen.items() if now - at < RECENT_SECONDS}
        self._seen.update(dict.fromkeys(tenants, now))


def _merged(queues: Mapping[str, list[Req]], counts: Counter[str], few: frozenset[str]) -> Iterator[Req]:
    """Yield the requests of ``queues``: those of the tenants ``few`` first, and among these and among the others those of a
    tenant that has fewer in ``counts``, for its weight. Counts what it yields."""
    tenants = {i: (tenant, iter(queue)) for i, (tenant, queue) in enumerate(queues.items())}
    heap: list[tuple[bool, float, int, Req]] = []

    def push(i: int) -> None:
        tenant, queue = tenants[i]
        req = next(queue, None)
        if req is not None:
            heapq.heappush(heap, (tenant not in few, (counts[tenant] + 1) / req.weight, i, req))

    for i in tenants:
        push(i)
    while heap:
        *_, i, req = heapq.heappop(heap)
        counts[req.tenant] += 1
        yield req
        push(i)


def _give(given: dict[int, int], reqs: Iterable[Req], budget: int) -> None:
    """Give the tokens of ``budget`` to ``reqs`` in their order, as many as each can use. Mutates ``given``."""
    for req in reqs:
        count = min(req.extend_len - given[req.uid], budget)
        given[req.uid] += count
        budget -= count


def largest_tenant(running: Sequence[Req]) -> str | None:
    """Return the tenant whose requests hold the most pages; None if there is one tenant only."""
    pages: Counter[str] = Counter()
    for req in running:
        pages[req.tenant] += req.num_pages
    return max(pages, key=pages.__getitem__) if len(pages) > 1 else None


def has_equal_share(waiting: Sequence[Req], tenant: str, most: int) -> bool:
    """Return True if ``tenant`` has at least its equal part of ``most`` waiting requests. A full queue still takes the requests
    of a tenant that has less."""
    counts = Counter(req.tenant for req in waiting)
    return counts[tenant] >= most / len(counts.keys() | {tenant})
