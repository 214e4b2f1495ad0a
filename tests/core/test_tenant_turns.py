"""Test that tenants take turns in the scheduler and at the grammar compilers.

Run: .venv/bin/python -m pytest -q -p no:xdist tests/core/test_tenant_turns.py
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dovetail.constraints.fair_pool import FairPool
from dovetail.errors import QueueFullError
from dovetail.messages import GenerateMsg
from dovetail.sampling_params import SamplingParams
from dovetail.scheduler.limits import SchedulerLimits
from dovetail.scheduler.turns import LEAST_TOKENS, StepBudget, TenantTurns
from dovetail.types import Req

sys.path.insert(0, str(Path(__file__).parent))
from pretended import Run, build


def message(rid: str, tenant: str, priority: int = 0, weight: float = 1.0) -> GenerateMsg:
    return GenerateMsg(rid, [1, 2], SamplingParams(), 0, priority=priority, tenant=tenant, weight=weight)


def many(tenant: str, count: int, **more: object) -> list[GenerateMsg]:
    return [message(f"{tenant}{i}", tenant, **more) for i in range(count)]


# the scheduler


def admitted(run: Run) -> list[str]:
    """Run everything, and return the tenants in the order in which their requests entered."""
    order: list[str] = []
    while run.scheduler.has_work:
        before = {req.uid for req in run.scheduler.running}
        run.step()
        order += [req.tenant for req in run.scheduler.running if req.uid not in before]
    run.finish()
    return order


def test_a_tenant_with_one_request_does_not_wait_for_another_tenants_thirty():
    scheduler, device = build(num_pages=80, max_running=3, chunk_size=12)
    run = Run(scheduler, device)
    for i in range(30):
        run.add(f"a{i}", [i] * 8, {"tenant": "a"}, max_new_tokens=4)
    run.add("b", [40] * 8, {"tenant": "b"}, max_new_tokens=4)
    assert "b" in admitted(run)[:3]
    assert len(run.ends) == 31


def test_a_tenant_leaves_a_slot_to_others_while_there_are_others():
    scheduler, device = build(num_pages=200, max_running=8, chunk_size=100)
    run = Run(scheduler, device)
    run.add("b0", [1] * 8, {"tenant": "b"}, max_new_tokens=1)
    for i in range(20):
        run.add(f"a{i}", [i] * 8, {"tenant": "a"}, max_new_tokens=50, ignore_eos=True)
    for _ in range(4):
        run.step()
    assert [req.tenant for req in scheduler.running].count("a") == 7
    run.add("b1", [3] * 8, {"tenant": "b"}, max_new_tokens=50, ignore_eos=True)
    run.step()
    assert [req.tenant for req in scheduler.running].count("b") == 1
    run.finish()


def test_one_tenant_may_use_every_slot():
    scheduler, device = build(num_pages=200, max_running=8, chunk_size=100)
    run = Run(scheduler, device)
    for i in range(20):
        run.add(f"a{i}", [i] * 8, {"tenant": "a"}, max_new_tokens=20, ignore_eos=True)
    run.step()
    assert len(scheduler.running) == 8
    run.finish()


def test_when_pages_are_short_the_tenant_with_the_most_gives_back():
    scheduler, device = build(num_pages=36)
    run = Run(scheduler, device)
    for i in range(4):
        run.add(f"a{i}", [i] * 20, {"tenant": "a"}, max_new_tokens=80, ignore_eos=True)
    for _ in range(12):
        run.step()
    run.add("b", [40] * 8, {"tenant": "b"}, max_new_tokens=12, ignore_eos=True)
    other = scheduler._by_rid["b"]
    run.finish()
    assert scheduler.totals.retractions > 0
    assert other.num_retractions == 0
    assert len(run.ends) == 5


def test_a_long_prompt_leaves_part_of_each_step_to_another_tenant():
    scheduler, device = build(num_pages=120, max_running=4, chunk_size=8)
    run = Run(scheduler, device)
    run.add("long", [5] * 100, {"tenant": "a"}, max_new_tokens=1)
    run.step()
    run.add("short", [6] * 4, {"tenant": "b"}, max_new_tokens=1)
    for _ in range(3):
        run.step()
    assert "short" in run.ends
    assert "long" not in run.ends
    run.finish()


def prompt_tokens_of_steps(run: Run) -> list[int]:
    """Run everything, and return the number of prompt tokens of each step that has some."""
    tokens: list[int] = []
    schedule = run.scheduler.schedule

    def noted():
        plan = schedule()
        if plan is not None and plan.num_extend:
            counts = plan.extend_lens[: plan.num_extend]
            assert counts.min() > 0, "a prompt without tokens must not enter a step"
            tokens.append(int(counts.sum()))
        return plan

    run.scheduler.schedule = noted
    run.finish()
    return tokens


def test_a_short_prompt_is_not_cut_at_the_end_of_a_step_of_several_tenants():
    scheduler, device = build(num_pages=200, max_running=16, chunk_size=300)
    run = Run(scheduler, device)
    for i in range(6):
        run.add(f"r{i}", [i] * 30, {"tenant": "ab"[i % 2]}, max_new_tokens=1)
    assert prompt_tokens_of_steps(run) == [90, 90], "the third has 4 of 64 tokens left, and needs 30"


def prompts_of_steps(run: Run, count: int) -> list[Counter[str]]:
    """Run ``count`` steps, and return the prompt tokens of each tenant in each."""
    found: list[Counter[str]] = []
    for _ in range(count):
        before = {req.uid for req in run.scheduler.running}
        run.step()
        new = [req for req in run.scheduler.running if req.uid not in before]
        found.append(Counter({req.tenant: 0 for req in new}))
        for req in new:
            found[-1][req.tenant] += req.prompt_len
    return found


def test_a_short_prompt_has_a_step_of_its_own_after_one_of_a_tenant_with_many():
    """A step of the tenant with many requests follows, also while others come one after the other."""
    scheduler, device = build(num_pages=900, max_running=64, chunk_size=256)
    run = Run(scheduler, device)
    more = {"max_new_tokens": 90, "ignore_eos": True}
    for i in range(40):
        run.add(f"a{i}", [i] * 16, {"tenant": "a"}, **more)
    run.add("b0", [45] * 16, {"tenant": "b"}, **more)
    assert prompts_of_steps(run, 1) == [{"a": 48, "b": 16}], "the first step says nothing about who has had one"
    assert prompts_of_steps(run, 1) == [{"a": 64}]
    run.add("b1", [46] * 16, {"tenant": "b"}, **more)
    assert prompts_of_steps(run, 1) == [{"b": 16}]
    run.add("b2", [47] * 16, {"tenant": "b"}, **more)
    assert prompts_of_steps(run, 1) == [{"a": 48, "b": 16}], "a tenant is not held twice in a row"
    run.add("b3", [48] * 16, {"tenant": "b"}, **more)
    run.add("c0", [49] * 16, {"tenant": "c"}, **more)
    assert prompts_of_steps(run, 1) == [{"b": 16, "c": 16}]
    for i in range(4, 7):
        run.add(f"b{i}", [40 + i] * 48, {"tenant": "b"}, max_new_tokens=60, ignore_eos=True)
    assert prompts_of_steps(run, 2) == [{"b": 144, "a": 32}, {"a": 64}], (
        "b may have twice 64 tokens, and a has half of them"
    )


@pytest.mark.parametrize(
    ("running", "first"), [({}, "b"), ({"b": 3}, "b"), ({"b": 4}, "a"), ({"b": 4, "a": 9}, "b")], ids=str
)
def test_a_tenant_with_few_requests_goes_first_unless_it_runs_more_than_its_part(running: dict[str, int], first: str):
    """It has few waiting also if it has all slots, and others would then never have one."""
    turns = TenantTurns(limits(2048), False, lambda: 0.0)
    for tenant in "ab":
        turns.arrived(tenant)
    waiting = [request(i, "aaaaaaaab"[i], 0) for i in range(9)]
    runs = [request(9 + i, tenant, 0) for i, tenant in enumerate(Counter(running).elements())]
    assert next(iter(turns.order(waiting, runs))).tenant == first


def test_a_tenant_is_not_held_for_one_that_cannot_be_admitted():
    scheduler, device = build(num_pages=200, max_running=16, chunk_size=512)
    run = Run(scheduler, device)
    more = {"max_new_tokens": 8, "ignore_eos": True}
    for i in range(12):
        run.add(f"a{i}", [i] * 16, {"tenant": "a"}, **more)
    assert prompts_of_steps(run, 1)[0]["a"] == 12 * 16
    for i in range(12, 20):
        run.add(f"a{i}", [i] * 16, {"tenant": "a"}, **more)
    run.add("b0", [45] * 16, {"tenant": "b"}, **more)
    scheduler._admission._waits[0].is_waiting = lambda req: (
        req.tenant == "b"
    )  # for a prefix that another request computes
    assert prompts_of_steps(run, 1) == [{"a": 32}], "14 of 16 slots may be a's"


def test_tenants_with_about_as_many_requests_share_steps():
    turns = TenantTurns(limits(2048), False, lambda: 0.0)
    for tenant in "ab":
        turns.arrived(tenant)
    reqs = [request(i, "aaaab"[i % 5], 0) for i in range(5)]
    turns.chosen([(reqs[0], 9)], reqs[1:])
    turns.order(reqs, [])
    assert turns.take_held() == {"a"}
    turns.order(reqs[1:], [])
    assert turns.take_held() == frozenset()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40)), min_size=1, max_size=12), st.integers(1, 200))
@example([("a", 16)] * 8 + [("b", 40)] * 2, 64)
@example([("a", 16)] * 16 + [("b", 40)] * 4, 140)
def test_no_step_has_more_prompt_tokens_than_a_chunk(prompts: list[tuple[str, int]], chunk_size: int):
    scheduler, device = build(num_pages=400, max_running=16, chunk_size=chunk_size)
    run = Run(scheduler, device)
    for i, (tenant, length) in enumerate(prompts):
        run.add(f"r{i}", [i] * length, {"tenant": tenant}, max_new_tokens=1)
    assert max(prompt_tokens_of_steps(run)) <= chunk_size


def test_a_full_queue_takes_the_request_of_a_tenant_that_has_none():
    scheduler, _ = build(max_waiting=4)
    for msg in many("a", 4):
        scheduler.add(msg)
    with pytest.raises(QueueFullError):
        scheduler.add(message("a5", "a"))
    for msg in many("b", 2):
        scheduler.add(msg)
    with pytest.raises(QueueFullError):
        scheduler.add(message("b3", "b"))
    scheduler.add(message("c", "c"))


def request(uid: int, tenant: str, priority: int, weight: float = 1.0) -> Req:
    import numpy as np

    req = Req(f"r{uid}", np.zeros(8, np.int32), 4, SamplingParams(), priority=priority, tenant=tenant, weight=weight)
    req.uid = uid
    return req


def limits(chunk_size: int, **given: float) -> SchedulerLimits:
    return SchedulerLimits(8, 100, chunk_size, 1000, 100, **given)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2)), max_size=30), st.booleans())
def test_turns_permute_and_keep_each_tenants_order(found: list[tuple[str, int]], by_priority: bool):
    reqs = [request(i, tenant, priority) for i, (tenant, priority) in enumerate(found)]
    if by_priority:
        reqs.sort(key=lambda req: -req.priority)
    turns = TenantTurns(limits(64), by_priority)
    for req in reqs:
        turns.arrived(req.tenant)
    ordered = list(turns.order(reqs, []))
    assert sorted(req.uid for req in ordered) == list(range(len(reqs)))
    for tenant in "abc":
        assert [r.uid for r in ordered if r.tenant == tenant] == [r.uid for r in reqs if r.tenant == tenant]
    if by_priority:
        assert [req.priority for req in ordered] == [req.priority for req in reqs]
    else:
        places = Counter[str]()
        totals = Counter(req.tenant for req in reqs)
        for req in ordered:
            places[req.tenant] += 1
            waiting = [places[tenant] for tenant in totals if places[tenant] < totals[tenant]]
            assert all(places[req.tenant] - count <= 1 for count in waiting)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40)), max_size=8),
    st.lists(st.sampled_from("abcd"), max_size=3),
    st.integers(1, 64),
)
def test_prompts_that_continue_use_the_budget_and_leave_each_tenant_its_part(
    prompts: list[tuple[str, int]], waiting: list[str], budget: int
):
    reqs = []
    for i, (tenant, left) in enumerate(prompts):
        req = request(i, tenant, 0)
        req.device_len = left
        reqs.append(req)
    others = [request(100 + i, tenant, 0) for i, tenant in enumerate(waiting)]
    rows = TenantTurns(limits(64), False).divide(budget, others, reqs)
    left = {req.uid: req.extend_len for req in reqs}
    assert all(0 < count <= left[req.uid] for req, count in rows)
    tenants = {tenant for tenant, _ in prompts}
    waits = bool(tenants) and bool(set(waiting) - tenants)
    parts = len(tenants) + waits
    total = sum(count for _, count in rows)
    assert total == min(sum(left.values()), budget - (budget // parts if waits else 0))
    for tenant in tenants:
        got = sum(count for req, count in rows if req.tenant == tenant)
        assert got >= min(sum(left[r.uid] for r in reqs if r.tenant == tenant), budget // parts)
    if parts == 1:
        assert [req.uid for req, _ in rows] == sorted(req.uid for req, _ in rows)


@given(st.integers(1, 10_000), st.floats(1e-6, 1e-2), st.floats(0, 0.02))
def test_steps_approach_their_duration_within_their_bounds(chunk_size: int, per_token: float, fixed: float):
    budget, now = StepBudget(chunk_size, 0.03), 0.0
    for _ in range(60):
        tokens = budget.tokens(now)
        budget.chosen(tokens, now)
        now += fixed + per_token * tokens
    least = min(chunk_size, max(chunk_size // 32, LEAST_TOKENS))
    most = max(chunk_size // 4, least)
    assert least <= tokens <= most <= chunk_size
    if least < tokens < most:
        assert fixed + per_token * tokens == pytest.approx(0.03, rel=0.3)


def test_a_step_that_was_not_filled_says_nothing_about_time():
    budget = StepBudget(8192, 0.03)
    before = budget.tokens(0.0)
    budget.chosen(before - 1, 0.0)
    assert budget.tokens(0.001) == before
    budget.chosen(before, 0.001)
    assert budget.tokens(0.002) > before


def test_a_step_with_more_tokens_than_usual_does_not_make_the_next_ones_shorter():
    budget = StepBudget(1024, 0.01)
    for now in (0.0, 0.01):
        assert budget.tokens(now) == 64
        budget.chosen(64, now)
    budget.chosen(128, 0.02)
    assert budget.tokens(0.04) == 64


def test_steps_are_shorter_while_several_tenants_send_and_only_then():
    now = 0.0
    turns = TenantTurns(limits(8192), False, lambda: now)
    turns.arrived("a")
    assert turns.budget() == 8192
    now = 100.0
    turns.arrived("a")
    assert turns.budget() == 8192
    turns.arrived("b")  # the other tenant is still active, although it has been alone for long
    assert turns.budget() == 256
    now += 30.0
    assert turns.budget() == 8192
    turns.order([request(0, "a", 0), request(1, "b", 0)], [])
    assert turns.budget() == 256, "tenants whose requests wait are not forgotten"


def test_steps_keep_their_tokens_if_config_says_so():
    turns = TenantTurns(limits(8192, tenants_step_seconds=0), False)
    for tenant in "ab":
        turns.arrived(tenant)
    assert turns.budget() == 8192
    turns.chosen([(request(0, "a", 0), 8192)], [request(1, "b", 0)])
    assert turns.budget() == 8192


# the compilers


def test_slow_constraints_of_one_tenant_do_not_hold_every_thread():
    pool, gate, begun = FairPool(2, "test"), threading.Event(), []
    done = threading.Event()

    def slow(name: str) -> None:
        begun.append(name)
        assert gate.wait(20)

    for i in range(10):
        pool.submit("a", 1.0, slow, f"a{i}")
    pool.submit("b", 1.0, done.set)
    assert done.wait(20)
    assert begun == ["a0", "a1"]
    ended = threading.Event()
    for name in ("b1", "b2"):
        pool.submit("b", 1.0, slow, name)
    gate.set()
    pool.submit("c", 1.0, ended.set)
    assert ended.wait(20)
    pool.close()
