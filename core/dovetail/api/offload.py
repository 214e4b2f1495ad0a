"""Do the heavy work of a request on threads, in turns for tenants, so that it does not delay the requests of others.

Work that takes less time than the change of threads stays on the event loop: bodies, texts and answers below the sizes
that ``body.parse``, ``ApiHost.encode`` and ``responses.whole`` know.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from dovetail.errors import QueueFullError, RateLimitError
from dovetail.fair_queue import FairTurns

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

MANY_INPUTS = 16
"""The inputs of requests with more than this number are read in turns for tenants."""

INPUTS_OF_TURN = 64
"""Inputs that are read in one turn if other tenants wait for theirs."""

INPUTS_OF_PART = 64
"""Inputs that are prepared for the engine before other work of the event loop goes on."""

LARGE_ANSWER = 1 << 20
"""Answers of more than this number of bytes (as estimated) are counted, and written on a thread."""


class Offload:
    """Run calls on threads: ``threads`` at the same time, and one more for a tenant that has none running.

    The waiting calls of different tenants take turns, by the time that their calls have taken. So a tenant that sends
    much heavy work delays its own, and the thread that is kept for others does not wait for it.
    """

    def __init__(self, threads: int = 1) -> None:
        self._turns = FairTurns(threads)

    async def run(self, tenant: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of ``call``, when it is the turn of ``tenant``."""
        await self._turns.begin(tenant)
        start = time.monotonic()
        weight = request_scope().weight
        work = asyncio.ensure_future(asyncio.to_thread(call, *args, **kwargs))
        work.add_done_callback(lambda _: self._turns.end(tenant, (time.monotonic() - start) / weight))
        return await asyncio.shield(work)  # a thread cannot be stopped: a request that is cancelled keeps its turn

    def others_wait(self, tenant: str) -> bool:
        """Return True if calls of other tenants wait for their turn."""
        return self._turns.others_wait(tenant)

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Run a block on the event loop, in place of a call, when it is the turn of ``tenant``."""
        await self._turns.begin(tenant)
        start = time.monotonic()
        try:
            yield
        finally:
            self._turns.end(tenant, (time.monotonic() - start) / request_scope().weight)


class ByteBudget:
    """Count bytes that tenants hold, in all and each."""

    def __init__(self, most: float, most_of_tenant: float) -> None:
        self.most, self.most_of_tenant = most, most_of_tenant
        self.held: Counter[str] = Counter()
        self._total = 0

    def take(self, tenant: str, count: int, own: int = 0) -> bool:
        """Count ``count`` more bytes. Return False if a limit forbids it. A tenant that holds nothing except the ``own``
        bytes of the same body or answer may always take more of it."""
        held = self.held[tenant]
        if held > own and (held + count > self.most_of_tenant or self._total + count > self.most):
            return False
        self.held[tenant] += count
        self._total += count
        return True

    def give_back(self, tenant: str, count: int) -> None:
        """Give bytes back."""
        self.held[tenant] -= count
        self._total -= count
        if not self.held[tenant]:
            del self.held[tenant]


class HeldBytes:
    """Count the bytes of one body while it arrives."""

    def __init__(self, budget: ByteBudget, tenant: str) -> None:
        self._budget, self._tenant = budget, tenant
        self.count = 0

    def add(self, count: int) -> None:
        """Count more bytes. Raises ``QueueFullError``."""
        if not self._budget.take(self._tenant, count, own=self.count):
            raise QueueFullError(
                "the server holds as many request bodies as it may (server.limits.bodies_mib); retry later"
            )
        self.count += count


@dataclass(slots=True)
class Intake:
    """Hold what the requests of one server share while they are read and answered."""

    body_seconds: float | None = None
    bodies: ByteBudget = field(default_factory=lambda: ByteBudget(float("inf"), float("inf")))
    answers: ByteBudget = field(default_factory=lambda: ByteBudget(float("inf"), float("inf")))
    offload: Offload = field(default_factory=Offload)
    inputs: Offload = field(default_factory=Offload)  # a second one: a request that reads its inputs may use a thread


@dataclass(slots=True)
class RequestScope:
    """Describe the HTTP request that the current task answers: who shares its limits, and what it holds.

    ``tenant`` is the tenant, or the address of a client without a key. ``large`` is True if the body was large, so that
    work on all of it is left to a thread. ``answer_bytes`` is the estimated size of its answer. ``adapter`` is the adapter
    (LoRA) that it names as its model, or empty.
    """

    intake: Intake = field(default_factory=Intake)
    tenant: str = ""
    weight: float = 1.0
    large: bool = False
    answer_bytes: int = 0
    adapter: str = ""

    @contextmanager
    def body(self) -> Iterator[HeldBytes]:
        """Count a body until it is read."""
        held = HeldBytes(self.intake.bodies, self.tenant)
        try:
            yield held
        finally:
            if held.count:
                self.intake.bodies.give_back(self.tenant, held.count)

    def expect_answer(self, count: int) -> None:
        """Count an answer of ``count`` bytes until the request has ended. Raises ``RateLimitError`` if the tenant has
        too many large answers open."""
        if count <= LARGE_ANSWER:
            return
        if not self.intake.answers.take(self.tenant, count):
            most = self.intake.answers.most_of_tenant / 2**20
            raise RateLimitError(
                f"answers of {self.intake.answers.held[self.tenant] / 2**20:.0f} MiB are open, and this one may have "
                f"{count / 2**20:.0f} MiB; allowed: {most:g} MiB at the same time (server.limits.answer_mib)",
                retry_after=1.0,
            )
        self.answer_bytes += count

    def close(self) -> None:
        """Give back what the request holds."""
        if self.answer_bytes:
            self.intake.answers.give_back(self.tenant, self.answer_bytes)
            self.answer_bytes = 0


_scope: ContextVar[RequestScope | None] = ContextVar("request_scope", default=None)


def request_scope() -> RequestScope:
    """Return the scope of the current task. Outside of a server it has no limits."""
    return _scope.get() or RequestScope()


@contextmanager
def entered(scope: RequestScope) -> Iterator[None]:
    """Make ``scope`` the scope of the current task, and of the tasks that it starts."""
    token = _scope.set(scope)
    try:
        yield
    finally:
        _scope.reset(token)
        scope.close()


async def offloaded(heavy: bool, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of ``call``, which runs on a thread if it is ``heavy``."""
    if not heavy:
        return call(*args, **kwargs)
    scope = request_scope()
    return await scope.intake.offload.run(scope.tenant, call, *args, **kwargs)


async def for_each(inputs: Sequence[T], call: Callable[[T], Awaitable[R]]) -> list[R]:
    """Return what ``call`` returns for each of a request's ``inputs``.

    If there are many, other work of the event loop goes on between them, and tenants take turns. The requests of one
    tenant are read one after the other: if they reached their next stage together, that would stop the event loop.
    """
    if len(inputs) <= MANY_INPUTS:
        return [await call(one) for one in inputs]
    scope = request_scope()
    turns = scope.intake.inputs
    results: list[R] = []
    while len(results) < len(inputs):
        async with turns.turn(scope.tenant):
            for one in inputs[len(results) :]:
                results.append(await call(one))
                await asyncio.sleep(0)
                if len(results) % INPUTS_OF_TURN == 0 and turns.others_wait(scope.tenant):
                    break
    return results


Parts = Generator[None, None, T]
"""Work of the event loop in short parts: other work may be done at each ``yield``."""


def slices_of(inputs: Sequence[T]) -> Iterator[Sequence[T]]:
    """Return ``inputs`` in slices of ``INPUTS_OF_PART``."""
    for start in range(0, len(inputs), INPUTS_OF_PART):
        yield inputs[start : start + INPUTS_OF_PART]


def at_once(work: Parts[T]) -> T:
    """Return the result of ``work``, whose parts are done one directly after the other."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


async def in_parts(work: Parts[T], inputs: int) -> T:
    """Return the result of ``work`` on a request's ``inputs``. If they are many, other work of the event loop goes on between
    the parts, and tenants take turns. The requests of one tenant are prepared one after the other, so that those that
    its full queue refuses cost nothing."""
    if inputs <= INPUTS_OF_PART:
        return at_once(work)
    scope = request_scope()
    async with scope.intake.inputs.turn(scope.tenant):
        try:
            while True:
                try:
                    next(work)
                except StopIteration as end:
                    return end.value
                await asyncio.sleep(0)
        finally:
            work.close()
