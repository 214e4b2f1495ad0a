"""The conformance suite of prefix caches must fail on caches that are wrong.

Run: python -m pytest -q tests/plugins/test_cache_suite.py
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import Phase, settings

from dovetail.interfaces.cache import CacheContext, Match, PrefixCache
from dovetail.interfaces.features import Feature
from dovetail.testing.cache import PrefixCacheSuite
from dovetail.testing.cache_reference import ReferenceCache
from dovetail.types import IntArray
from dovetail_cache.config import RadixConfig
from dovetail_cache.node import TOKEN_BYTES, Handle, Node
from dovetail_cache.radix import RadixCache


class LosesAPageAtSplit(RadixCache):
    """A branch loses the page before it, and forgets that it had it."""

    def _end_at(self, path: list[Node], length: int) -> Node:
        node = super()._end_at(path, length)
        if node.end == length and node.num_pages > 1 and len(node.children) == 1:
            node.key, node.pages = node.key[: -self._page_size * TOKEN_BYTES], node.pages[:, :-1]
            self._total -= 1
        return node


class IgnoresNamespaces(RadixCache):
    """Everybody shares one tree."""

    def match(self, tokens: IntArray, namespace: str = "") -> Match:
        return super().match(tokens)

    def insert(self, tokens: IntArray, pages: IntArray, namespace: str = "", priority: int = 0) -> Match:
        return super().insert(tokens, pages, "", priority)


class EvictsWhatIsLocked(RadixCache):
    """A lock counts, but protects nothing."""

    def lock(self, handle: Handle) -> None:
        super().lock(handle)
        self.unlock_path(handle)

    def unlock(self, handle: Handle) -> None:
        if handle.length:
            self._settle(handle)

    def unlock_path(self, handle: Handle) -> None:
        super().unlock(handle)


class UnlocksTheLastNodeOnly(RadixCache):
    """Lets go of the last node only when it unlocks."""

    def unlock(self, handle: Handle) -> None:
        if handle.length and handle.node is not None:
            handle.node.locks -= 1
            self._locked -= handle.node.num_pages if handle.node.locks == 0 else 0
            self._queue.push(handle.node)


class KeepsTheDuplicate(RadixCache):
    """Claims the offered pages even where it had its own."""

    def insert(self, tokens: IntArray, pages: IntArray, namespace: str = "", priority: int = 0) -> Match:
        result = super().insert(tokens, pages, namespace, priority)
        return result._replace(pages=pages.copy())


class KeepsTheCallersArrays(RadixCache):
    """Trusts the caller not to write to its arrays again."""

    def _grow(self, parent: Node, tokens: IntArray, pages: IntArray) -> Node:
        leaf = super()._grow(parent, tokens, pages)
        leaf.pages = pages
        return leaf


class MatchesHalfPages(RadixCache):
    """Does not look at the last token of a page."""

    def _but_last(self, tokens: IntArray) -> IntArray:
        return np.where(np.arange(len(tokens)) % self._page_size == self._page_size - 1, np.int32(0), tokens)

    def match(self, tokens: IntArray, namespace: str = "") -> Match:
        return super().match(self._but_last(tokens), namespace)

    def insert(self, tokens: IntArray, pages: IntArray, namespace: str = "", priority: int = 0) -> Match:
        return super().insert(self._but_last(tokens), pages, namespace, priority)


class FreesTwice(RadixCache):
    """Returns the last evicted page once more with the next eviction."""

    _last = np.empty((1, 0), np.int32)

    def evict(self, num_pages: int) -> IntArray:
        freed = super().evict(num_pages)
        again, self._last = self._last, freed[:, -1:]
        return np.concatenate([freed, again], axis=1)


class LosesTheRestOfALeaf(RadixCache):
    """Evicts a whole leaf, but gives back only what was asked for."""

    def _shrink(self, leaf: Node, count: int) -> IntArray:
        return super()._shrink(leaf, leaf.num_pages)[:, :count]


class SharesByTheLastNode(RadixCache):
    """Sees only rows that end at the same place."""

    def shared_prefixes(self, handles: Sequence[Handle]) -> list[tuple[list[int], int]]:
        ends: dict[Node, list[int]] = {}
        for i, handle in enumerate(handles):
            if handle.node is not None:
                ends.setdefault(handle.node, []).append(i)
        return [(rows, node.end) for node, rows in ends.items() if len(rows) > 1]


class SharesWithAllBelow(RadixCache):
    """One group for each first page, as long as its longest row."""

    def shared_prefixes(self, handles: Sequence[Handle]) -> list[tuple[list[int], int]]:
        tops: dict[Node, list[int]] = {}
        for i, handle in enumerate(handles):
            node = handle.node
            while node is not None and node.parent is not None and node.parent.parent is not None:
                node = node.parent
            if node is not None:
                tops.setdefault(node, []).append(i)
        return [(rows, max(handles[row].length for row in rows)) for rows in tops.values() if len(rows) > 1]


class SharesWholeBranches(RadixCache):
    """Whoever does not share the deepest prefix of a branch is left alone."""

    def shared_prefixes(self, handles: Sequence[Handle]) -> list[tuple[list[int], int]]:
        return super().shared_prefixes(handles)[-1:]


BROKEN = [
    LosesAPageAtSplit,
    IgnoresNamespaces,
    EvictsWhatIsLocked,
    UnlocksTheLastNodeOnly,
    KeepsTheDuplicate,
    KeepsTheCallersArrays,
    MatchesHalfPages,
    FreesTwice,
    LosesTheRestOfALeaf,
]


def _suite(cache_class: type[PrefixCache]) -> PrefixCacheSuite:
    class Suite(PrefixCacheSuite):
        name = "broken"

        def make(self, page_size: int, num_groups: int = 1) -> PrefixCache:
            return cache_class(RadixConfig(), CacheContext(page_size, num_groups))

        def offers(self, feature: Feature) -> bool:
            return True

        def history_settings(self) -> settings:
            return settings(super().history_settings(), phases=[Phase.generate])

    return Suite()


@pytest.mark.parametrize("check", [True, False], ids=["own-checks", "suite-only"])
@pytest.mark.parametrize("cache_class", BROKEN)
def test_a_broken_cache_fails(cache_class: type[RadixCache], check: bool, monkeypatch: pytest.MonkeyPatch):
    if not check:
        monkeypatch.setattr(RadixCache, "check_integrity", lambda self: None)
    with pytest.raises(AssertionError):
        _suite(cache_class).test_agrees_with_a_dictionary(4, 1)


@pytest.mark.parametrize("cache_class", [SharesByTheLastNode, SharesWithAllBelow, SharesWholeBranches])
def test_wrong_groups_fail(cache_class: type[RadixCache]):
    with pytest.raises(AssertionError):
        _suite(cache_class).test_random_paths_share_as_much_as_they_can(4, 1)


@pytest.mark.parametrize("cache_class", [RadixCache, ReferenceCache])
def test_the_right_caches_pass(cache_class: type[PrefixCache]):
    _suite(cache_class).test_agrees_with_a_dictionary(4, 2)
