"""Test the scheduler with several pools, as data-parallel attention has them, against a pretended device (``pretended.py``).

.venv/bin/python -m pytest -q tests/core/test_scheduler_pools.py
"""

import random
import sys
from pathlib import Path

import numpy as np
import pytest

from dovetail.interfaces.cache import Match, PrefixCache
from dovetail.memory.pools import PoolCaches
from dovetail.scheduler.pool_choice import PoolPlace, best_first
from dovetail.types import FinishKind

sys.path.insert(0, str(Path(__file__).parent))
from pretended import EOS, VOCAB, Run, build


def pools_of(scheduler):
    """Return the pools of the running requests by their rids."""
    return {req.rid: scheduler.ledger.of(req).pool for req in scheduler.running}


@pytest.mark.parametrize(
    ("page_size", "pools", "cache", "lag"),
    [(1, 2, "radix", True), (4, 3, "radix", False), (4, 2, "none", True), (16, 2, "radix", False)],
)
def test_random_traffic_in_little_memory(page_size, pools, cache, lag):
    """Every request gets the tokens of its own text, from the pages of one pool, however often it is retracted. Groups and
    sessions pin prefixes meanwhile."""
    rng = random.Random(page_size + pools)
    limits = {
        "max_running": 7,
        "chunk_size": rng.choice([3, 9, 64]),
        "wait_for_prefix": cache != "none",
        "pin_pages": 9,
    }
    scheduler, device = build(page_size, 1 + 128 // page_size, cache, pools=pools, **limits)
    run, used = Run(scheduler, device, lag), set()
    stems = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
    for i in range(60):
        prompt = rng.choice(stems)[: rng.randrange(41)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
        hints = {"group": rng.choice(["", "g"]), "group_size": 3, "session": rng.choice(["", "s"])}
        run.add(f"r{i}", prompt, hints, max_new_tokens=rng.randrange(1, 40), ignore_eos=rng.random() < 0.7)
        for _ in range(rng.randrange(3)):
            run.step()
            used |= set(pools_of(scheduler).values())
        if rng.random() < 0.2:
            run.take(scheduler.abort(f"r{rng.randrange(i + 1)}", "changed my mind"))
    run.finish()
    assert used == set(range(pools))
    assert set(run.ends) == set(run.prompts)
    assert all(run.texts[rid][-1] == EOS for rid, kind in run.ends.items() if kind is FinishKind.STOP)


def test_requests_without_a_common_prefix_are_divided_evenly():
    scheduler, device = build(pools=2, max_running=6, chunk_size=100)
    run = Run(scheduler, device)
    for i in range(8):
        run.add(f"r{i}", [i, *range(9)], max_new_tokens=20, ignore_eos=True)
    run.step()
    assert sorted(pools_of(scheduler).values()) == [0, 0, 0, 1, 1, 1], "each pool has half of the slots"
    counts = scheduler.page_counts()
    assert counts.total == 2 * 39
    run.finish()


def test_the_next_turn_runs_where_the_first_one_is_cached():
    scheduler, device = build(page_size=1, pools=2, max_running=4, chunk_size=100)
    run = Run(scheduler, device)
    for rid, first in (("a", 20), ("b", 3)):  # ``b`` runs in the other pool
        run.add(rid, [first] * 10, max_new_tokens=4, ignore_eos=True)
    run.step()
    pools = pools_of(scheduler)
    assert set(pools.values()) == {0, 1}
    run.finish_requests()
    for rid in "ba":
        run.add(rid * 2, [*run.texts[rid], 1, 2], max_new_tokens=4, ignore_eos=True)
    run.step()
    found = pools_of(scheduler)
    assert (found["aa"], found["bb"]) == (pools["a"], pools["b"])
    run.finish()
    assert scheduler.totals.cached_tokens == 2 * 13


def test_a_prefix_is_computed_once_in_each_pool():
    """The first request of each pool computes it, and the others wait for it there."""
    scheduler, device = build(page_size=4, num_pages=80, pools=2, max_running=8, chunk_size=200)
    run = Run(scheduler, device)
    for i in range(8):
        run.add(f"r{i}", [*range(20, 40), i], max_new_tokens=12, ignore_eos=True)
    run.finish()
    assert scheduler.totals.cached_tokens == 6 * 20


def test_a_request_is_retracted_from_the_pool_that_lacks_pages():
    scheduler, device = build(num_pages=24, pools=2, max_running=4, cache="none", chunk_size=100)
    run = Run(scheduler, device)
    run.add("long", [1] * 20, max_new_tokens=60, ignore_eos=True)
    run.add("short", [2] * 8, max_new_tokens=20, ignore_eos=True)
    run.add("beside", [3] * 20, max_new_tokens=60, ignore_eos=True)
    run.add("last", [4] * 8, max_new_tokens=20, ignore_eos=True)
    by_rid = {req.rid: req for req in scheduler.waiting}
    run.step()
    run.step()
    pools = pools_of(scheduler)
    assert pools["long"] == pools["beside"] != pools["short"] == pools["last"]
    run.finish()
    assert by_rid["beside"].num_retractions > 0
    assert by_rid["last"].num_retractions == by_rid["short"].num_retractions == 0, "their pool had pages"


def test_places_are_ordered_by_crowding_then_by_prefix_then_by_requests():
    def order(counts, lengths):
        pages = np.zeros((1, 0), np.int32)
        made = [PoolPlace(pool, Match(length, pages, None), count) for pool, (length, count) in enumerate(zip(lengths, counts, strict=True))]  # fmt: skip
        return [place.ledger for place in best_first(made, counts)]

    assert order([3, 3], [0, 8]) == [1, 0]
    assert order([4, 3], [8, 0]) == [0, 1], "one request more is no crowd"
    assert order([5, 3], [8, 0]) == [1, 0]
    assert order([40, 36], [8, 0]) == [0, 1], "of many requests, one in eight may be more"
    assert order([2, 1, 1], [0, 0, 0]) == [1, 2, 0]


def test_policies_match_in_all_pools():
    scheduler, device = build(page_size=1, pools=2, max_running=4)
    run = Run(scheduler, device)
    for first in (20, 3):
        run.add(f"r{first}", [first] * 10, max_new_tokens=1, ignore_eos=True)
    run.finish_requests()
    caches = PoolCaches([member.cache for member in scheduler.ledger.members])
    for first in (20, 3):
        assert caches.match(np.full(12, first, np.int32)).length == 10
    assert caches.total == caches.evictable == (20,)
    assert not isinstance(caches, PrefixCache), "it has no method that changes a cache"
