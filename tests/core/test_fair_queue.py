"""Test that tenants take turns: in a queue, and with the threads that do heavy work.

Run: .venv/bin/python -m pytest -q -p no:xdist tests/core/test_fair_queue.py
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.offload import (
    INPUTS_OF_TURN,
    ByteBudget,
    Intake,
    Offload,
    RequestScope,
    entered,
    for_each,
    offloaded,
    request_scope,
)
from dovetail.errors import RateLimitError
from dovetail.fair_queue import FairQueue, FairSlots


def drained(queue: FairQueue[int], weights: dict[str, float] | None = None) -> list[str]:
    served = []
    while (tenant := queue.next_tenant()) is not None:
        queue.take(tenant, 1 / (weights or {}).get(tenant, 1.0))
        served.append(tenant)
    return served


def test_virtual_times_of_tenants_that_come_once_are_forgotten():
    slots: FairSlots[int] = FairSlots(1)
    for number in range(20_000):
        assert slots.idle
        slots.start(f"tenant {number}")
        slots.ended(f"tenant {number}", 1.0)
    slots.put("last", 0)
    assert len(slots._waiting._times) < 5000
    assert slots.start_next() == ("last", 0)
    assert not slots.idle


@given(st.lists(st.sampled_from("abc"), max_size=60))
def test_while_tenants_wait_none_is_served_twice_before_another_once(arrivals: list[str]):
    queue: FairQueue[int] = FairQueue()
    for i, tenant in enumerate(arrivals):
        queue.put(tenant, i)
    left, served = Counter(arrivals), Counter()
    for tenant in drained(queue):
        served[tenant] += 1
        left[tenant] -= 1
        waiting = [served[other] for other in left if left[other]]
        assert all(served[tenant] - count <= 1 for count in waiting)
    assert not +left


def test_items_of_a_tenant_keep_their_order_and_weights_divide_the_service():
    queue: FairQueue[int] = FairQueue()
    for i in range(90):
        queue.put("heavy", i)
        queue.put("light", i)
    first = drained(queue, {"heavy": 2.0})[:60]
    assert first.count("heavy") == pytest.approx(40, abs=1)


def test_a_tenant_that_was_away_gains_nothing_by_it():
    queue: FairQueue[int] = FairQueue()
    for i in range(100):
        queue.put("busy", i)
    for _ in range(50):
        queue.take("busy")
    for i in range(50):
        queue.put("late", i)
    order = drained(queue)[:20]
    assert order.count("late") == pytest.approx(10, abs=1)


def test_a_skipped_or_removed_item_is_not_served():
    queue: FairQueue[int] = FairQueue()
    queue.put("a", 1)
    queue.put("b", 2)
    assert queue.next_tenant(skip=["a"]) == "b"
    assert queue.remove("b", 2)
    assert not queue.remove("b", 2)
    assert queue.next_tenant(skip=["a"]) is None
    assert len(queue) == 1


class Work:
    """Record the order in which calls run. Calls whose name begins with "held" wait for ``gate``."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.most = 0
        self.gate = threading.Event()
        self._running = 0
        self._lock = threading.Lock()

    def __call__(self, name: str) -> str:
        with self._lock:
            self._running += 1
            self.most = max(self.most, self._running)
            self.begun.append(name)
        if name.startswith("held"):
            assert self.gate.wait(20)
        with self._lock:
            self._running -= 1
        return name


def test_heavy_work_of_one_tenant_never_holds_every_thread():
    async def scenario() -> None:
        offload, work = Offload(threads=1), Work()
        first = [asyncio.ensure_future(offload.run("greedy", work, f"held{i}")) for i in range(8)]
        await asyncio.sleep(0.05)
        assert work.begun == ["held0"]
        assert await offload.run("other", work, "x") == "x"  # while the other tenant's call still runs
        work.gate.set()
        assert await asyncio.gather(*first) == [f"held{i}" for i in range(8)]
        assert work.most == 2

    asyncio.run(scenario())


def test_a_request_that_leaves_while_it_waits_leaves_nothing_behind():
    async def scenario() -> None:
        offload, work = Offload(threads=1), Work()
        running = asyncio.ensure_future(offload.run("a", work, "held"))
        waiting = [asyncio.ensure_future(offload.run("a", work, f"w{i}")) for i in range(4)]
        await asyncio.sleep(0.05)
        waiting[1].cancel()
        running.cancel()  # its thread cannot be stopped, and keeps its turn
        await asyncio.sleep(0.05)
        assert work.begun == ["held"]
        work.gate.set()
        done = await asyncio.gather(*waiting, return_exceptions=True)
        assert done[0] == "w0"
        assert isinstance(done[1], asyncio.CancelledError)
        assert done[2:] == ["w2", "w3"]
        assert await offload.run("a", work, "last") == "last"

    asyncio.run(scenario())


@pytest.mark.parametrize("count", [0, 1, 16, 17, 300])
def test_every_input_is_read_once_and_in_order(count: int):
    async def double(one: int) -> int:
        return 2 * one

    assert asyncio.run(for_each(range(count), double)) == [2 * i for i in range(count)]


def test_requests_with_many_inputs_take_turns_and_end_in_different_cycles_of_the_loop():
    ends: list[tuple[str, int]] = []
    read: list[str] = []
    cycle = 0

    async def count_cycles() -> None:
        nonlocal cycle
        while True:
            cycle += 1
            await asyncio.sleep(0)

    async def request(intake: Intake, tenant: str, name: str, inputs: int) -> None:
        async def one(_: int) -> None:
            read.append(tenant)

        with entered(RequestScope(intake, tenant)):
            await for_each(range(inputs), one)
            ends.append((name, cycle))

    async def scenario() -> None:
        intake = Intake()
        counting = asyncio.ensure_future(count_cycles())
        many = [request(intake, "greedy", f"g{i}", 8 * INPUTS_OF_TURN) for i in range(4)]
        await asyncio.gather(*many, request(intake, "other", "o", 20))
        counting.cancel()

    asyncio.run(scenario())
    assert len({cycle for name, cycle in ends if name[0] == "g"}) == 4
    assert cycle > 8 * INPUTS_OF_TURN
    last = max(i for i, tenant in enumerate(read) if tenant == "other")
    assert last < 4 * INPUTS_OF_TURN, "a tenant with few inputs waits for a turn of others at most"


def test_an_input_that_is_refused_ends_the_turn():
    async def refuse(one: int) -> int:
        if one == 20:
            raise ValueError(one)
        return one

    async def scenario() -> None:
        with entered(RequestScope(Intake(), "a")):
            for _ in range(3):
                with pytest.raises(ValueError, match="20"):
                    await for_each(range(100), refuse)
            assert await for_each(range(19), refuse) == list(range(19))

    asyncio.run(scenario())


def test_an_error_on_a_thread_is_raised_and_frees_the_thread():
    async def scenario() -> None:
        with entered(RequestScope(Intake(), "a")):
            for _ in range(3):
                with pytest.raises(ZeroDivisionError):
                    await offloaded(True, lambda: 1 // 0)
            assert await offloaded(True, threading.get_ident) != threading.get_ident()
            assert await offloaded(False, threading.get_ident) == threading.get_ident()

    asyncio.run(scenario())


def test_bytes_of_one_tenant_leave_some_for_others():
    budget = ByteBudget(100, 50)
    assert budget.take("a", 80)  # the first is always accepted
    assert not budget.take("a", 1)
    assert budget.take("a", 10, own=80)  # more of the same body
    assert budget.take("b", 50)
    assert not budget.take("b", 10)
    budget.give_back("a", 90)
    assert "a" not in budget.held
    assert budget.take("a", 10)


def test_large_answers_are_counted_until_their_request_ends():
    intake = Intake(answers=ByteBudget(10 << 20, 4 << 20))
    with entered(RequestScope(intake, "a")) as _:
        request_scope().expect_answer(3 << 20)
        request_scope().expect_answer(1000)  # small ones are not counted
        with pytest.raises(RateLimitError):
            request_scope().expect_answer(2 << 20)
        with entered(RequestScope(intake, "b")):
            request_scope().expect_answer(3 << 20)
    assert not intake.answers.held
