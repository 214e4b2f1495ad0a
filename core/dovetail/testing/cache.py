"""Test prefix caches: the conformance suite of their interface."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from dovetail.interfaces.cache import CacheContext, GroupDescriptor, Match, PrefixCache
from dovetail.interfaces.features import Feature
from dovetail.registry.specs import ComponentKind
from dovetail.testing.cache_groups import GroupedCacheCases
from dovetail.testing.cache_machine import PrefixCacheMachine, tokens_of
from dovetail.testing.cache_sharing import check_groups, most_saved, saved
from dovetail.types import IntArray

LAYOUTS = [(1, 1), (4, 1), (16, 1), (1, 2), (4, 2), (16, 2)]
each_layout = pytest.mark.parametrize(("page_size", "num_groups"), LAYOUTS)


def make_pages(first: int, count: int, num_groups: int = 1) -> IntArray:
    """Return int32 ``[groups, count]``: pages ``first, first + 1, ...`` in group 0, and other pages in the next
    groups."""
    return np.arange(first, first + count, dtype=np.int32) + 1000 * np.arange(num_groups, dtype=np.int32)[:, None]


def freed_by(cache: PrefixCache) -> list[int]:
    """Evict all that can be evicted from a cache of one group. Return the freed pages in ascending order."""
    (pages,) = cache.evict((100,))
    return sorted(pages.tolist())


def similar_keys(key: IntArray, page_size: int) -> Iterator[IntArray]:
    """Yield keys of six pages that differ from ``key`` in a way that a sum, a cut or a sorted key does not show."""
    for bit in (0, 7, 8, 15, 16, 17, 24, 30):
        other = key.copy()
        other[4 * page_size] ^= np.int32(1 << bit)
        yield other
    for first, second in ((2 * page_size, 3 * page_size), (page_size, 2 * page_size - 1)):
        if first != second:
            other = key.copy()
            other[[first, second]] = key[[second, first]]
            yield other
            other = key.copy()
            step = np.int32(1) if key[first] < 2**30 else np.int32(-1)
            other[first] += step
            other[second] -= step
            yield other
    if page_size > 1:
        yield key.reshape(6, page_size)[[0, 1, 3, 2, 4, 5]].reshape(-1)


class PrefixCacheSuite(GroupedCacheCases):
    """Test a prefix cache. ``class TestMine(PrefixCacheSuite): name = "mine"`` is a complete test file."""

    kind: ClassVar[ComponentKind] = ComponentKind.CACHE
    examples: ClassVar[int] = 40
    """Hypothesis runs this many random histories per layout, of up to 40 calls each. They are the same in every run."""

    def make(self, page_size: int, num_groups: int = 1) -> PrefixCache:
        """Return a new cache with full groups."""
        return self.make_for(CacheContext(page_size, (GroupDescriptor(),) * num_groups))

    def filled(self, page_size: int, num_groups: int = 1) -> PrefixCache:
        """Return a cache that holds pages 1 to 4 for four pages of zeros."""
        self.require(Feature.CACHE_REUSE)
        cache = self.make(page_size, num_groups)
        cache.insert(tokens_of([0] * 4, page_size), make_pages(1, 4, num_groups))
        return cache

    @each_layout
    def test_agrees_with_a_dictionary(self, page_size: int, num_groups: int) -> None:
        """No page is lost, shared wrongly or freed twice; locks hold; namespaces are separate."""
        namespaces = ("", "a", "b") if self.offers(Feature.CACHE_NAMESPACES) else ("",)
        suite = self

        class Machine(PrefixCacheMachine):
            def __init__(self) -> None:
                super().__init__(suite.make(page_size, num_groups), page_size, num_groups, namespaces)

        run_state_machine_as_test(Machine, settings=self.history_settings())

    def history_settings(self) -> settings:
        """Return the settings with which hypothesis runs the random histories."""
        return settings(
            max_examples=self.examples,
            stateful_step_count=40,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        )

    @each_layout
    def test_an_empty_cache_finds_nothing(self, page_size: int, num_groups: int) -> None:
        """Nothing is found, nothing can be evicted, and an empty match can still be locked."""
        cache = self.make(page_size, num_groups)
        found = cache.match(tokens_of([0, 1], page_size))
        assert found.length == 0
        assert found.pages.shape == (num_groups, 0)
        assert found.pages.dtype == np.int32
        assert found.reached == (0,) * num_groups
        assert [pages.shape for pages in cache.evict((3,) * num_groups)] == [(0,)] * num_groups
        assert cache.total == cache.evictable == (0,) * num_groups
        cache.lock(found.handle)
        cache.unlock(found.handle)

    @each_layout
    def test_pages_that_are_not_kept_belong_to_the_caller(self, page_size: int, num_groups: int) -> None:
        """Of the offered pages, the cache owns those in the result, and its counter agrees."""
        cache = self.make(page_size, num_groups)
        offered = make_pages(1, 4, num_groups)
        result = cache.insert(tokens_of([0] * 4, page_size, page_size - 1), offered)
        kept = result.pages.shape[1]
        assert np.array_equal(result.pages, offered[:, :kept])
        assert cache.total == (kept,) * num_groups
        assert np.array_equal(np.sort(cache.reset(), axis=1), offered[:, :kept])

    @each_layout
    def test_finds_whole_pages_of_a_prefix(self, page_size: int, num_groups: int) -> None:
        """The match ends at the last page boundary before the first different token."""
        cache = self.filled(page_size, num_groups)
        for same in range(4 * page_size + 1):
            tokens = tokens_of([0] * 5, page_size)
            tokens[same:] = 7
            found = cache.match(tokens)
            assert found.length == same - same % page_size
            assert np.array_equal(found.pages, make_pages(1, same // page_size, num_groups))

    @each_layout
    def test_keys_of_a_large_vocabulary_are_compared_in_full(self, page_size: int, num_groups: int) -> None:
        """Keys of random token ids differ in one bit of one token, in the order of their tokens or of their pages, or
        have the same sums; each finds its own pages, whose numbers are in no order."""
        self.require(Feature.CACHE_REUSE)
        rng = np.random.default_rng(page_size)
        cache = self.make(page_size, num_groups)
        key = rng.integers(0, 2**31 - 1, 6 * page_size, dtype=np.int32)
        numbers = rng.permutation(np.arange(1, 200_000, dtype=np.int32))
        pages = numbers[: 6 * num_groups].reshape(num_groups, 6)
        cache.insert(key, pages)
        for count, other in enumerate(similar_keys(key, page_size), start=1):
            same = int(np.argmax(other != key)) // page_size
            found = cache.match(other)
            assert found.length == same * page_size, "a key that differs is taken to be the same"
            assert np.array_equal(found.pages, pages[:, :same])
            own = numbers[6 * num_groups * count :][: 6 * num_groups].reshape(num_groups, 6)
            held = cache.insert(other, own)
            again = cache.match(other)
            assert again.length == held.pages.shape[1] * page_size
            assert np.array_equal(again.pages, held.pages)
        assert np.array_equal(cache.match(key).pages, pages), "a later key has replaced pages of the first"

    def test_a_key_may_end_inside_a_run(self) -> None:
        """A key may end inside a cached run."""
        cache = self.filled(4)
        for length in range(17):
            assert cache.match(np.zeros(length, dtype=np.int32)).length == length - length % 4

    def test_duplicate_pages_belong_to_the_caller(self) -> None:
        """A second insert of the same prefix returns the pages of the first one, and its own pages after them."""
        cache = self.filled(4)
        offered = make_pages(51, 6)
        result = cache.insert(tokens_of([0] * 6, 4), offered)
        assert result.pages.tolist() == [[1, 2, 3, 4, 55, 56]]
        assert cache.total == (6,)

    def test_branches_share_their_beginning(self) -> None:
        """Two keys that diverge after two pages hold these two pages together."""
        cache = self.filled(4)
        cache.insert(tokens_of([0, 0, 1, 1], 4), make_pages(11, 4))
        assert cache.match(tokens_of([0, 0, 0, 0], 4)).pages.tolist() == [[1, 2, 3, 4]]
        assert cache.match(tokens_of([0, 0, 1, 1], 4)).pages.tolist() == [[1, 2, 13, 14]]
        assert cache.total == (6,)

    def test_namespaces_are_separate(self) -> None:
        """The same tokens in another namespace are another prefix."""
        self.require(Feature.CACHE_NAMESPACES)
        cache = self.filled(4)
        tokens = tokens_of([0] * 4, 4)
        assert cache.match(tokens, "tenant").length == 0
        assert cache.insert(tokens, make_pages(11, 4), "tenant").pages.tolist() == [[11, 12, 13, 14]]
        assert cache.match(tokens).pages.tolist() == [[1, 2, 3, 4]]

    def test_evicts_leaves_first_and_enough(self) -> None:
        """After an eviction, the remaining pages are always a whole prefix."""
        self.require(Feature.CACHE_EVICT)
        cache = self.filled(4)
        (before,) = cache.total
        (freed,) = cache.evict((2,))
        assert len(freed) >= 2
        left = cache.match(tokens_of([0] * 4, 4))
        assert left.pages.tolist() == [[1, 2, 3, 4][: before - len(freed)]]
        assert sorted([*left.pages[0].tolist(), *freed.tolist()]) == [1, 2, 3, 4], "a freed page is still kept"

    def test_a_lock_protects_its_path_until_the_last_unlock(self) -> None:
        """Locks are counted; pages after the locked prefix may be evicted."""
        self.require(Feature.CACHE_EVICT)
        cache = self.filled(4)
        first, second = cache.match(tokens_of([0] * 2, 4)), cache.match(tokens_of([0] * 3, 4))
        for found in (first, second, second):
            cache.lock(found.handle)
        assert freed_by(cache) == [4]
        cache.unlock(second.handle)
        assert freed_by(cache) == []
        cache.unlock(second.handle)
        assert freed_by(cache) == [3]
        cache.unlock(first.handle)
        assert freed_by(cache) == [1, 2]

    def test_a_lock_holds_after_later_inserts(self) -> None:
        """An insert that branches off a locked prefix neither removes the lock nor extends it."""
        self.require(Feature.CACHE_EVICT)
        cache = self.filled(4)
        found = cache.match(tokens_of([0] * 4, 4))
        cache.lock(found.handle)
        cache.insert(tokens_of([0, 1], 4), make_pages(11, 2))
        assert freed_by(cache) == [12]
        cache.unlock(found.handle)
        assert cache.evictable == (4,)

    def locked(self, cache: PrefixCache, kinds: Sequence[int], page_size: int, namespace: str = "") -> Match:
        """Insert one page for each of ``kinds`` into the cache, with pages that no other prefix has, and lock them."""
        groups = cache.match(tokens_of([], page_size)).pages.shape[0]
        first = 1 + cache.total[0] * 7
        found = cache.insert(tokens_of(kinds, page_size), make_pages(first, len(kinds), groups), namespace)
        cache.lock(found.handle)
        return found

    @each_layout
    def test_random_paths_share_as_much_as_they_can(self, page_size: int, num_groups: int) -> None:
        """Groups hold the same pages and save as much as any other groups would, while paths are added and removed."""
        self.require(Feature.CACHE_SHARED_PREFIXES)
        rng = random.Random(page_size + num_groups)
        for _ in range(self.examples):
            cache = self.make(page_size, num_groups)
            kinds = [[rng.choice([0, 0, 1, 2]) for _ in range(rng.randrange(7))] for _ in range(7)]
            found = [self.locked(cache, path, page_size) for path in kinds]
            for match in [found.pop(rng.randrange(len(found))) for _ in range(rng.randrange(4))]:
                cache.unlock(match.handle)
            cache.evict((rng.randrange(4),) * num_groups)
            paths = [match.pages for match in found]
            groups = cache.shared_prefixes([match.handle for match in found])
            check_groups(groups, paths, page_size)
            assert saved(groups) == most_saved(paths, page_size), "other groups save more"

    def test_remaining_rows_share_a_shorter_prefix(self) -> None:
        """Rows that share a longer prefix form a group, and the remaining rows share the shorter prefix before it."""
        self.require(Feature.CACHE_SHARED_PREFIXES)
        cache = self.make(4)
        kinds = [[0, 0, 1, 1], [0, 2], [0, 0, 1, 2], [0, 1], [0, 0, 1, 1]]
        handles = [self.locked(cache, path, 4).handle for path in kinds]
        groups = sorted((sorted(rows), tokens) for rows, tokens in cache.shared_prefixes(handles))
        assert groups == [([0, 2, 4], 12), ([1, 3], 4)]

    def test_empty_prefixes_share_nothing(self) -> None:
        """No handles, a single handle and empty prefixes form no group."""
        self.require(Feature.CACHE_SHARED_PREFIXES)
        cache = self.make(4)
        empty = [cache.match(tokens_of([1], 4)).handle for _ in range(2)]
        one, two = (self.locked(cache, [0, 0], 4).handle for _ in range(2))
        assert list(cache.shared_prefixes([])) == []
        assert list(cache.shared_prefixes([one])) == []
        assert list(cache.shared_prefixes([*empty, one])) == []
        ((rows, tokens),) = cache.shared_prefixes([empty[0], one, empty[1], two])
        assert (list(rows), tokens) == ([1, 3], 8)

    def test_namespaces_share_nothing(self) -> None:
        """The same tokens in two namespaces are in different pages."""
        self.require(Feature.CACHE_SHARED_PREFIXES)
        self.require(Feature.CACHE_NAMESPACES)
        cache = self.make(4)
        handles = [self.locked(cache, [0, 0], 4, namespace).handle for namespace in ("a", "b", "a")]
        assert [(list(rows), tokens) for rows, tokens in cache.shared_prefixes(handles)] == [([0, 2], 8)]
