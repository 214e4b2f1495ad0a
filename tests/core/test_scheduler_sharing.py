"""Test that decode rows that share a prefix are adjacent, and keep their order until a row joins or leaves.

.venv/bin/python -m pytest -q tests/core/test_scheduler_sharing.py
"""

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

from dovetail.constraints.requests import RequestConstraints
from dovetail.constraints.service import GrammarService
from dovetail.interfaces.cache import CacheContext
from dovetail.memory.allocator import PageAllocator
from dovetail.memory.ledger import PageLedger
from dovetail.memory.table import RequestTable
from dovetail.messages import GenerateMsg
from dovetail.sampling_params import SamplingParams
from dovetail.scheduler.limits import SchedulerLimits
from dovetail.scheduler.scheduler import Scheduler
from dovetail.types import StepResult
from dovetail_cache.config import RadixConfig
from dovetail_cache.radix import RadixCache
from dovetail_policies.config import FcfsConfig
from dovetail_policies.simple import Fcfs

sys.path.insert(0, str(Path(__file__).parent))
from pretended import reqs_of

PAGE = 4


def build(num_pages=1000, **limits):
    settings = {
        "max_running": 64,
        "max_waiting": 100,
        "chunk_size": 512,
        "context_len": 200,
        "vocab_size": 1000,
        "shared_prefixes": True,
    } | limits
    cache = RadixCache(RadixConfig(), CacheContext(PAGE))
    ledger = PageLedger(PageAllocator(num_pages), cache, RequestTable(np.zeros((1, 65, 60), np.int32)), PAGE)
    limits = SchedulerLimits(**settings)
    constraints = RequestConstraints(GrammarService(None), limits.vocab_size, [])
    return Scheduler(limits, ledger, Fcfs(FcfsConfig(), None), constraints, None, frozenset())


def add(scheduler, rid, prompt, new=50):
    scheduler.add(GenerateMsg(rid, list(prompt), SamplingParams(max_new_tokens=new, ignore_eos=True), 0))


class Steps:
    """Run the steps of a scheduler, committed at once or one step late; every token is 1."""

    def __init__(self, scheduler, lag):
        self.scheduler, self.lag, self.launched, self.reqs = scheduler, lag, None, []

    def step(self):
        """Make a step. Return its plan; ``reqs`` are the requests of its rows then."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.reqs = reqs_of(self.scheduler, plan)
        done = self.launched if self.lag else plan
        self.launched = plan
        if done is not None:
            self.scheduler.commit(done, StepResult(np.ones((int(done.samples.sum()), 1), np.int64)))
        self.scheduler.check_integrity()
        return plan

    def decode_only(self):
        """Return the first plan in which all running requests decode, with everything committed before."""
        while True:
            plan = self.step()
            if not self.scheduler.waiting and not self.scheduler.prefilling and self.launched.num_extend == 0:
                return self.step() if self.lag else plan


def groups_of(plan, reqs):
    """Return the names of each group's rows, and its length."""
    starts = plan.shared.starts.tolist()
    names = [{r.rid for r in reqs[a:b]} for a, b in itertools.pairwise(starts)]
    return list(zip(names, plan.shared.lens.tolist(), strict=True))


@pytest.mark.parametrize("lag", [False, True])
def test_rows_stand_by_group_in_the_order_of_their_first(lag):
    scheduler = build()
    for i, stem in enumerate("axbabca"):
        add(scheduler, f"{stem}{i}", [*[ord(stem)] * (22 if stem == "a" else 9), 500 + i])
    steps = Steps(scheduler, lag)
    plan = steps.decode_only()
    assert groups_of(plan, steps.reqs) == [({"a0", "a3", "a6"}, 20), ({"x1"}, 0), ({"b2", "b4"}, 8), ({"c5"}, 0)]
    assert [r.rid for r in steps.reqs] == ["a0", "a3", "a6", "x1", "b2", "b4", "c5"]
    assert plan.slots.tolist() == [r.slot for r in steps.reqs]
    assert plan.shared.saved == 2 * 20 + 8


@pytest.mark.parametrize("lag", [False, True])
def test_nothing_is_asked_while_nothing_changes(lag):
    scheduler = build()
    steps = Steps(scheduler, lag)
    for i in range(6):
        add(scheduler, f"r{i}", [*[i % 2] * 9, 500 + i], new=30 + i)
    first = steps.decode_only()
    reqs = steps.reqs
    asked = []
    ask = scheduler.ledger.cache.shared_prefixes
    scheduler.ledger.cache.shared_prefixes = lambda handles: asked.append(len(handles)) or ask(handles)
    for _ in range(10):
        plan = steps.step()
        assert steps.reqs is reqs, "the rows have moved"
        assert (plan.rows_version, plan.slots is first.slots) == (first.rows_version, True)
        assert plan.shared is not first.shared, "the engine has written to the plan's arrays"
        assert plan.shared.starts is first.shared.starts
        assert plan.prefix_lens.tolist() == [r.cached_len - 1 for r in reqs]
    assert asked == []
    scheduler.abort("r0", "")
    plan = steps.step()
    assert groups_of(plan, steps.reqs) == [({"r2", "r4"}, 8), ({"r1", "r3", "r5"}, 8)][::-1]
    assert asked == [5]
    while scheduler.has_work:
        steps.step()
    assert max(asked) == 5
    assert len(asked) <= 5, "the cache was queried more often than rows have left"


def test_there_are_no_groups_without_a_shared_prefix():
    scheduler = build()
    for i in range(3):
        add(scheduler, f"r{i}", [i] * 9)
    assert Steps(scheduler, False).decode_only().shared is None


@pytest.mark.parametrize("limits", [{"shared_prefixes": False}, {"draft_width": 2}])
def test_there_are_no_groups_where_attention_does_not_read_them(limits, monkeypatch):
    monkeypatch.setattr(RadixCache, "shared_prefixes", None)
    scheduler = build(**limits)
    for i in range(3):
        add(scheduler, f"r{i}", [*[7] * 9, i])
    assert Steps(scheduler, False).decode_only().shared is None


def test_a_batch_with_prompts_has_no_groups():
    scheduler = build(chunk_size=16)
    steps = Steps(scheduler, False)
    for i in range(3):
        add(scheduler, f"r{i}", [*[7] * 9, i])
    assert steps.decode_only().shared is not None
    add(scheduler, "late", [8] * 60)
    plan = steps.step()
    assert plan.num_extend == 1
    assert len(steps.reqs) == len(plan.slots) == 4
    assert plan.shared is None


@pytest.mark.parametrize("lag", [False, True])
def test_groups_outlive_retraction(lag):
    """In little memory rows come and go; the groups always describe the rows that are in the plan."""
    scheduler = build(num_pages=46)
    steps = Steps(scheduler, lag)
    for i in range(8):
        add(scheduler, f"r{i}", [*[i % 2] * 9, 500 + i], new=40)
    grouped = 0
    while scheduler.has_work:
        plan = steps.step()
        if plan is not None and plan.shared is not None:
            grouped += 1
            for names, length in groups_of(plan, steps.reqs):
                assert len({int(name[1:]) % 2 for name in names}) == 1
                assert length == (8 if len(names) > 1 else 0) or length > 8
    assert scheduler.totals.retractions > 0
    assert grouped > 0
