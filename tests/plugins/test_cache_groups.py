"""Test what the radix tree evicts of sliding and state groups, and which prefixes of known workloads it finds.

Run: python -m pytest -q tests/plugins/test_cache_groups.py
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from dovetail.interfaces.cache import CacheContext, CacheGroupKind, GroupDescriptor, PrefixCache
from dovetail.memory.lookahead import with_lookahead
from dovetail.testing.cache import PrefixCacheSuite
from dovetail.testing.cache_groups import LAYOUTS, MIXED, run_traffic
from dovetail.testing.cache_machine import tokens_of
from dovetail.testing.cache_model import FULL, STATE, CacheModel, sliding
from dovetail.testing.cache_traffic import Traffic
from dovetail.testing.cache_workloads import agents, shared_prefixes, varying_prefixes
from dovetail_cache.config import RadixConfig
from dovetail_cache.grouped import GroupedRadixTree
from dovetail_cache.radix import RadixCache

GEMMA = (FULL, sliding(1024))
HYBRID = (FULL, STATE)


def make(context: CacheContext, eviction: str = "lru"):
    return RadixCache(RadixConfig.model_validate({"eviction": eviction}), context)


def model_of(*groups: GroupDescriptor, eviction: str = "lru") -> CacheModel:
    context = CacheContext(4, groups)
    return CacheModel(make(context, eviction), context)


def key(*kinds: int) -> np.ndarray:
    return tokens_of(kinds, 4)


def add(model: CacheModel, *kinds: int) -> None:
    """Insert a key with all its pages and snapshots."""
    model.insert(key(*kinds), model.fresh(len(kinds)), states=model.fresh_states())


def lengths(model: CacheModel, *keys: tuple[int, ...]) -> list[int]:
    """Return how many pages of each key are found."""
    return [model.match(key(*kinds)).length // 4 for kinds in keys]


def test_full_and_latent_groups_alone_have_the_plain_tree():
    assert type(make(CacheContext(4))) is RadixCache
    assert type(make(CacheContext(4, LAYOUTS["full, state"]))) is GroupedRadixTree


def test_pages_behind_the_window_are_evicted_before_those_in_it():
    model = model_of(FULL, sliding(9), STATE)
    add(model, *[0] * 12)
    model.evict((0, 9, 0))
    assert model.cache.total == (12, 3, 1)
    assert lengths(model, (0,) * 12) == [12]


def test_the_window_of_a_fork_is_worth_more_than_what_is_between_forks():
    model = model_of(FULL, sliding(9))
    add(model, *[0] * 6)
    add(model, *[0] * 6, 1, 1, 1, 1, 1, 1)  # the end of the first key is not a leaf any more
    add(model, *[0] * 6, 1, 2, 2, 2, 2, 2)  # but page 7 is a fork
    model.evict((0, 8, 0)[:2])
    assert lengths(model, (0,) * 6, (0, 0, 0, 0, 0, 0, 1, 0), (0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1)) == [0, 7, 12]


def test_snapshots_between_the_turns_of_one_session_are_evicted_first():
    model = model_of(FULL, STATE)
    turns = [(0, 1), (0, 1, 1, 1), (0, 1, 1, 1, 2, 0), (0, 1, 1, 1, 2, 0, 1, 1)]
    for turn in turns:
        add(model, *turn)
    model.evict((0, 3))
    assert lengths(model, *turns) == [0, 0, 0, 8]


def test_a_leaf_that_no_request_can_resume_at_is_dropped():
    """Without the snapshot, the pages after the last one that is left are of no use."""
    model = model_of(FULL, STATE)
    add(model, 0, 1)
    add(model, 0, 1, 1, 1, 1, 1)
    lengths(model, (0, 1), (0, 1))
    model.evict((0, 2))
    assert model.cache.total == (0, 0)


def test_the_last_snapshot_of_a_text_is_needed_although_the_text_goes_on():
    """A request ends some tokens after its last snapshot. The earlier ones are not needed while the last one is there; without
    the last one, the pages after the one before go too."""
    model = model_of(FULL, STATE)
    add(model, 1, 0)
    add(model, 1, 0, 0, 0)
    model.insert(key(1, 0, 0, 0, 0, 0), model.fresh(6))
    add(model, 2, 0)
    add(model, 2, 1)
    assert model.cache.evict_unneeded((0, 0)) == []
    model.evict_unneeded((9, 9))
    assert model.cache.total == (9, 3)
    assert lengths(model, (1, 0, 0, 0, 0, 0), (2, 0), (2, 1)) == [4, 2, 2]
    assert model.cache.evict_unneeded((9, 9)) == []
    model.evict((0, 3))
    assert model.cache.total == (0, 0)


def test_pages_behind_windows_are_not_needed():
    model = model_of(FULL, sliding(9))
    add(model, *[0] * 12)
    model.evict_unneeded((9, 4))
    assert model.cache.total == (12, 8)
    model.evict_unneeded((9, 9))
    assert model.cache.total == (12, 2)
    assert model.cache.evict_unneeded((9, 9)) == []
    assert lengths(model, (0,) * 12) == [12]


def test_the_window_of_the_last_snapshot_is_needed_although_the_text_goes_on():
    """The window of a text's end begins after the one of its last snapshot, at which the next turn resumes."""
    model = model_of(sliding(9), STATE)
    add(model, *[0] * 6)
    add(model, *[0] * 12)
    model.insert(key(*[0] * 14), model.fresh(14))
    model.evict_unneeded((99, 9))
    assert model.cache.total == (2, 1)
    assert lengths(model, (0,) * 14) == [12]
    model.evict((0, 1))
    assert model.cache.total == (0, 0)


@pytest.mark.parametrize("layout", ["full, sliding", "full, state", "sliding, state", MIXED])
def test_what_is_not_needed_changes_no_match(layout: str):
    """Texts grow, some from where another one has branched, and have snapshots at some of their lengths. Dropping what is not
    needed does not change how much is found of those that the cache knows and that do not go on in another one."""
    rng = random.Random(2)
    for _ in range(6):
        model = model_of(*LAYOUTS[layout])
        texts: list[tuple[int, ...]] = [(0,)]
        all_of_it = (10**6,) * len(model.groups)
        for _ in range(30):
            at = rng.randrange(len(texts))
            text = (*texts[at], *[rng.randrange(3) for _ in range(rng.randint(1, 5))])
            if rng.random() < 0.2:
                texts.append(text)
            else:
                texts[at] = text
            states = model.fresh_states() if rng.random() < 0.6 else None
            model.insert(key(*text), model.fresh(len(text)), states=states)
            if rng.random() < 0.3:
                known = [text for text in texts if model.match(key(*text)).common == 4 * len(text)]
                ends = [text for text in known if sum(other[: len(text)] == text for other in known) == 1]
                before = lengths(model, *ends)
                model.evict_unneeded(all_of_it)
                assert lengths(model, *ends) == before
                assert model.cache.evict_unneeded(all_of_it) == []
        model.cache.check_integrity()


def test_what_saves_more_per_byte_stays_longer():
    model = model_of(FULL, STATE)
    add(model, 1, *[0] * 20)
    add(model, 2, 0)  # later, but it saves a tenth
    model.evict((0, 1))
    assert lengths(model, (1, *[0] * 20), (2, 0)) == [21, 0]


def test_what_is_not_used_ages():
    """Each eviction raises the clock, so that a long prefix that no request uses goes before shorter new ones."""
    model = model_of(FULL, STATE)
    add(model, 1, *[0] * 4)
    for first in range(8):
        prompt = np.full(16, 10 + first, np.int32)
        model.insert(prompt, model.fresh(4), states=model.fresh_states())
        if len(model.held[1]) > 2:
            model.evict((0, 1))
    assert lengths(model, (1, *[0] * 4)) == [0]


@pytest.mark.parametrize(("eviction", "stays"), [("lfu", 2), ("priority", 1)])
def test_settings_of_eviction_hold_for_snapshots(eviction: str, stays: int):
    model = model_of(FULL, STATE, eviction=eviction)
    model.insert(key(1, 0), model.fresh(2), priority=5, states=model.fresh_states())
    add(model, 2, 0)
    for _ in range(3):
        model.match(key(2, 0))
        model.lock(model.found[-1])
        model.unlock(0)
    model.match(key(1, 0))
    model.evict((0, 1))
    assert lengths(model, (stays, 0), (3 - stays, 0)) == [2, 0]


def test_evicting_parts_costs_by_what_is_evicted_not_by_the_tree():
    model = model_of(FULL, sliding(9), STATE)
    for first in range(400):
        model.cache.insert(np.full(16, first, np.int32), model.fresh(4), states=model.fresh_states())
    tree = model.cache
    assert isinstance(tree, GroupedRadixTree)
    ranks = [0]
    for part in tree._parts:
        part.queue._rank = lambda node, rank=part.queue._rank: (ranks.__setitem__(0, ranks[0] + 1), rank(node))[1]
    tree.evict((0, 1, 1))  # each queue is put in order once
    ranks[0] = 0
    for _ in range(10):
        tree.evict((0, 1, 1))
    assert ranks[0] <= 80


def test_queues_do_not_grow_with_the_calls():
    context = CacheContext(4, (FULL, sliding(9), STATE))
    tree = make(context)
    assert isinstance(tree, GroupedRadixTree)
    model = CacheModel(tree, context)
    for call in range(2000):
        prompt = np.full(24, call % 50, np.int32)
        tree.insert(prompt, model.fresh(6), states=model.fresh_states())
        freed = tree.evict((0, 2, 1))
        assert len(freed[2]) == 1
    assert all(len(part.queue._heap) <= 200 for part in tree._parts)
    assert len(tree._queue._heap) <= 200


@pytest.mark.parametrize("layout", ["full, sliding", "state", MIXED])
def test_lookahead_finds_the_same_lengths(layout: str):
    """All pages begin with the same token, so that a cache of pairs finds what the plain one finds."""
    context = CacheContext(4, LAYOUTS[layout])
    plain, pairs = make(context), with_lookahead(make, context, 1)
    model, rng = CacheModel(plain, context), random.Random(1)
    for _ in range(300):
        kinds = [rng.choice([0, 0, 0, 1]) for _ in range(rng.randint(1, 10))]
        tokens, known = tokens_of(kinds, 4), tokens_of(kinds, 4, tail=1)
        if rng.random() < 0.4:
            pages = model.fresh(len(kinds), [(rng.randrange(3), rng.randrange(10)) for _ in range(4)])
            states = model.fresh_states() if rng.random() < 0.5 else None
            results = [cache.insert(key, pages, states=states) for cache, key in ((plain, tokens), (pairs, known))]
        else:
            results = [plain.match(tokens), pairs.match(known)]
        found, other = results
        assert (found.length, found.reached, found.common) == (other.length, other.reached, other.common)
        assert np.array_equal(found.pages, other.pages)
        assert found.states is None or other.states is None or np.array_equal(found.states, other.states)


@pytest.mark.parametrize("groups", [(FULL,), GEMMA, (sliding(1024),)], ids=str)
def test_shared_prefixes_of_100_tokens_are_found(groups):
    assert shared_prefixes(make, groups, 100)[:2] == (63, 63)


@pytest.mark.parametrize("groups", [HYBRID, (*GEMMA, STATE), (STATE,)], ids=str)
def test_states_find_shared_prefixes_once_the_second_request_was_there(groups):
    assert shared_prefixes(make, groups, 100)[:2] == (62, 63)


@pytest.mark.parametrize("groups", [GEMMA, (sliding(1024),)], ids=str)
def test_prefixes_that_vary_by_100_tokens_around_1500_are_found(groups):
    assert varying_prefixes(make, groups)[:2] == (64, 64)


@pytest.mark.parametrize("groups", [HYBRID, (STATE,)], ids=str)
def test_states_find_prefixes_that_vary_where_one_has_branched_before(groups):
    """The prompts branch at 13 different pages; only the first at each page finds a shorter prefix."""
    hits = varying_prefixes(make, groups)
    assert hits[:2] == (51, 64)
    assert hits.rate > 0.8


def test_sessions_that_append_turns_are_found_under_memory_pressure():
    """A page of the sliding group has the bytes of five pages of the full group, as in models with five sliding layers
    for each full one. In the same bytes, full groups alone find three quarters of these sessions."""
    groups = (FULL, GroupDescriptor(CacheGroupKind.SLIDING, 1024, num_bytes=5))
    ours = agents(make, groups, (17_000, 8_000))
    full = agents(make, (FULL,), ((17_000 + 5 * 8_000) // 6,))
    assert ours.possible == full.possible == 640
    assert ours.found > 600
    assert ours.rate >= 0.8
    assert full.found < 500


def test_sessions_with_states_are_found_under_memory_pressure():
    hits = agents(make, HYBRID, (17_000, 140))
    assert hits.found > 600
    assert hits.rate >= 0.8


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("eviction", ["lru", "lfu", "priority"])
def test_long_histories(layout: str, eviction: str):
    """Run longer random histories than the suite of every cache, in each order of eviction."""

    class Histories(PrefixCacheSuite):
        name = "radix"
        examples = 600

        def make_for(self, context: CacheContext) -> PrefixCache:
            return make(context, eviction)

    Histories().test_groups_agree_with_a_dictionary(layout, 4)


def run_requests(layout: str, calls: int) -> None:
    context = CacheContext(4, LAYOUTS[layout])
    sizes = tuple({"state": 12, "sliding": 40}.get(str(group.kind), 60) for group in context.groups)
    run_traffic(Traffic(make(context), context, sizes), calls, random.Random(calls))


def test_calls_lose_no_page():
    run_requests(MIXED, 2_000)


@pytest.mark.full
@pytest.mark.parametrize("layout", [MIXED, "full, sliding", "full, state", "sliding, state"])
def test_100_000_calls_lose_no_page(layout: str):
    run_requests(layout, 100_000)
