"""Test the radix tree: the suite in every order of eviction, and what each order evicts first.

Run: python -m pytest -q tests/plugins/test_cache_radix.py
"""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest

from dovetail.interfaces.cache import CacheContext
from dovetail.testing.cache import PrefixCacheSuite, make_pages
from dovetail_cache.config import RadixConfig
from dovetail_cache.node import TOKEN_BYTES
from dovetail_cache.radix import RadixCache
from dovetail_cache.sharing import Fork, shared_prefixes


class TestRadix(PrefixCacheSuite):
    name = "radix"


class TestRadixLfu(PrefixCacheSuite):
    name = "radix"
    settings = {"eviction": "lfu"}  # noqa: RUF012
    examples = 10


class TestRadixPriority(PrefixCacheSuite):
    name = "radix"
    settings = {"eviction": "priority"}  # noqa: RUF012
    examples = 10


def _cache(eviction: str, page_size: int = 1) -> RadixCache:
    return RadixCache(RadixConfig.model_validate({"eviction": eviction}), CacheContext(page_size))


def _key(first: int, length: int = 2) -> np.ndarray:
    return np.full(length, first, dtype=np.int32)


def _three(eviction: str, priorities: tuple[int, int, int] = (0, 0, 0)) -> RadixCache:
    """Insert prefixes 1, 2 and 3 in that order; prefix p holds the pages 10 p and 10 p + 1."""
    cache = _cache(eviction)
    for first, priority in zip((1, 2, 3), priorities, strict=True):
        cache.insert(_key(first), make_pages(10 * first, 2), priority=priority)
    return cache


def _order(cache: RadixCache) -> list[int]:
    return [int(cache.evict((2,))[0][0]) // 10 for _ in range(3)]


def test_lru_forgets_what_was_used_longest_ago():
    cache = _three("lru")
    cache.match(_key(1))
    cache.insert(_key(2, 1), make_pages(99, 1))
    assert _order(cache) == [3, 1, 2]


def test_lru_sees_matches_made_after_a_lock():
    cache = _three("lru")
    found = cache.match(_key(1))
    cache.lock(found.handle)
    cache.match(_key(2))
    cache.unlock(found.handle)
    assert _order(cache) == [3, 1, 2]


def test_lfu_forgets_what_was_locked_least():
    cache = _three("lfu")
    for first, times in ((1, 3), (2, 1), (3, 2)):
        for _ in range(times):
            found = cache.match(_key(first))
            cache.lock(found.handle)
            cache.unlock(found.handle)
    for _ in range(5):
        cache.match(_key(2))  # looking is no use
    assert _order(cache) == [2, 3, 1]


def test_priority_forgets_the_lowest_first_and_the_oldest_among_equals():
    assert _order(_three("priority", (1, 2, 0))) == [3, 1, 2]
    cache = _three("priority", (1, 1, 1))
    cache.match(_key(1))
    assert _order(cache) == [2, 3, 1]


def test_a_prefix_has_the_highest_priority_of_those_that_share_it():
    cache = _three("priority", (0, 1, 2))
    cache.insert(_key(1), make_pages(50, 2), priority=5)
    assert _order(cache) == [2, 3, 1]


def test_only_as_much_as_needed_of_a_run_is_forgotten():
    cache = _cache("lru")
    cache.insert(_key(1, 100), make_pages(1, 100))
    assert cache.evict((3,))[0].tolist() == [98, 99, 100]
    assert cache.match(_key(1, 100)).length == 97
    cache.check_integrity()


def test_matching_does_not_change_the_tree():
    cache = _cache("lru", page_size=4)
    cache.insert(_key(1, 40), make_pages(1, 10))
    for length in range(41):
        cache.match(_key(1, length))
    assert cache.evict((1,))[0].tolist() == [10]
    (root,) = cache._roots.values()
    assert [len(node.children) for node in root.children.values()] == [0]


def test_a_namespace_leaves_nothing_behind():
    cache = _cache("lru")
    for tenant in range(50):
        cache.insert(_key(1), make_pages(10 * tenant + 1, 2), namespace=str(tenant))
    cache.reset()
    assert cache._roots == {}


def test_a_prefix_that_was_evicted_cannot_be_locked():
    cache = _three("lru")
    found = cache.match(_key(1))
    cache.reset()
    with pytest.raises(AssertionError, match="evicted between match and lock"):
        cache.lock(found.handle)


def test_unlocking_twice_is_an_assertion():
    cache = _three("lru")
    found = cache.match(_key(1))
    cache.lock(found.handle)
    cache.unlock(found.handle)
    with pytest.raises(AssertionError, match="more often"):
        cache.unlock(found.handle)


def _bytes(token: int) -> bytes:
    return np.int32(token).tobytes()


@pytest.mark.parametrize("fault", ["counter", "locks", "page twice", "parent", "length"])
def test_check_integrity_finds(fault: str):
    cache = _three("lru")
    cache.insert(np.array([1, 1, 5], dtype=np.int32), make_pages(70, 3))
    (root,) = cache._roots.values()
    node = root.children[_bytes(1)]
    cache.check_integrity()
    if fault == "counter":
        cache._total += 1
    elif fault == "locks":
        node.children[_bytes(5)].locks += 1
    elif fault == "page twice":
        node.pages[0, 0] = node.pages[0, 1]
    elif fault == "parent":
        node.children[_bytes(5)].parent = root
    else:
        node.key = node.key[TOKEN_BYTES:]
    with pytest.raises(AssertionError):
        cache.check_integrity()


@pytest.mark.parametrize("page_size", [1, 16])
def test_evicting_costs_by_what_is_evicted_not_by_the_tree(page_size: int):
    """Every node's rank is computed a bounded number of times for each leaf that is evicted."""
    cache = _cache("lru", page_size)
    for first in range(500):
        cache.insert(_key(first, page_size), make_pages(first + 1, 1))
    asked, rank = [0], cache._queue.rank

    def counted(node):
        asked[0] += 1
        return rank(node)

    cache._queue.rank = counted
    cache.evict((10,))
    assert asked[0] <= 20


def _grouped(cache: RadixCache, count: int, depth: int) -> list:
    """Lock ``count`` paths in a tree that branches in four at each of ``depth`` levels."""
    handles = []
    for row in range(count):
        runs = [np.full(32, (row >> (2 * level)) % 4, np.int32) for level in range(depth)]
        key = np.concatenate([*runs, np.full(32, 10 + row, np.int32)])
        handles.append(cache.insert(key, make_pages(1 + 200 * row, len(key))).handle)
        cache.lock(handles[-1])
    return handles


def test_groups_cost_by_the_nodes_of_the_paths():
    """512 paths of depth 4 need one number for each fork and for each node above it, whatever else the tree holds."""
    handles = _grouped(_cache("lru"), 512, 3)
    made = []
    with patch.object(Fork, "__init__", autospec=True, side_effect=Fork.__init__) as init:
        groups = shared_prefixes(handles)
        made.append(init.call_count)
    assert made == [4 + 16 + 64]
    assert sorted(len(rows) for rows, _ in groups) == [8] * 64
    assert {tokens for _, tokens in groups} == {96}


def test_groups_of_a_very_deep_tree():
    """Each row ends a token further than the one before: there is no recursion, and the result is the best cut of a
    straight line."""
    cache = _cache("lru")
    handles = []
    for end in range(1, 601):
        handles.append(cache.insert(_key(1, end), make_pages(1, end)).handle)
        cache.lock(handles[-1])
    (rows, tokens), *more = cache.shared_prefixes(handles)
    saved = sum((len(members) - 1) * length for members, length in [(rows, tokens), *more])
    # best(n): rows of 1 to n tokens, the last group being those of m to n
    best = np.zeros(601, np.int64)
    for n in range(1, 601):
        m = np.arange(1, n + 1)
        best[n] = ((n - m) * m + best[m - 1]).max()
    assert saved == best[600]
