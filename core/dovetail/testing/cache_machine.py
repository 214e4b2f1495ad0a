"""Compare a prefix cache with a dictionary: make random calls, and check after each call everything that must hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dovetail.interfaces.cache import Match, PrefixCache
from dovetail.types import IntArray

Column = tuple[int, ...]
"""The pages of one page of tokens, one for each group."""

Prefix = tuple[str, bytes]
"""A prefix: its namespace, and the bytes of the tokens of one or more whole pages."""


def tokens_of(kinds: Sequence[int], page_size: int, tail: int = 0) -> IntArray:
    """Return one page of tokens for each of ``kinds``, then ``tail`` more tokens. Kind 0 is all zeros; kinds 1 and 2
    differ from it only in the last and in the first token."""
    pages = np.zeros((len(kinds), page_size), dtype=np.int32)
    pages[:, -1] = np.where(np.equal(kinds, 1), 1, pages[:, -1]) if len(kinds) else 0
    pages[:, 0] = np.where(np.equal(kinds, 2), 2, pages[:, 0]) if len(kinds) else 0
    return np.concatenate([pages.ravel(), np.zeros(tail, dtype=np.int32)])


def prefixes_of(namespace: str, tokens: IntArray, page_size: int) -> list[Prefix]:
    """Return the whole-page prefixes of ``tokens``, shortest first."""
    whole = len(tokens) // page_size
    return [(namespace, tokens[: count * page_size].tobytes()) for count in range(1, whole + 1)]


def columns_of(pages: IntArray) -> list[Column]:
    """Return ``pages [groups, n]`` as n columns."""
    return [tuple(column) for column in pages.T.tolist()]


class LockedHandle(NamedTuple):
    """Hold a handle, and the prefixes that it protects once it is locked."""

    handle: Any
    prefixes: frozenset[Prefix]


class PrefixCacheMachine(RuleBasedStateMachine):
    """Act as the scheduler and the allocator at once.

    ``kept`` is the expected content: the column of pages that the cache must hold for each prefix. Page numbers are
    never used twice, so a page that appears twice, or that was never offered, is detected at once.
    """

    KINDS = st.lists(st.integers(0, 2), max_size=6)

    def __init__(self, cache: PrefixCache, page_size: int, num_groups: int, namespaces: Sequence[str]) -> None:
        super().__init__()
        self.cache = cache
        self.page_size = page_size
        self.num_groups = num_groups
        self.namespaces = namespaces
        self.next_page = 1
        self.kept: dict[Prefix, Column] = {}
        self.locked: list[LockedHandle] = []
        self.matched: list[LockedHandle] = []  # matched or inserted, not locked; valid until the next eviction

    @property
    def protected(self) -> set[Prefix]:
        """Return the prefixes that no eviction may drop."""
        return {prefix for held in self.locked for prefix in held.prefixes}

    @rule(kinds=KINDS, tail=st.integers(0, 15), space=st.integers(0, 2))
    def match(self, kinds: list[int], tail: int, space: int) -> None:
        """Check that exactly the longest kept prefix is found, with its pages."""
        namespace = self.namespaces[space % len(self.namespaces)]
        tokens = tokens_of(kinds, self.page_size, tail % self.page_size)
        known = self.known(namespace, tokens)
        found = self.cache.match(tokens, namespace)
        self.check_match(found, known)
        self.matched.append(LockedHandle(found.handle, frozenset(known)))

    @rule(
        kinds=KINDS, tail=st.integers(0, 15), space=st.integers(0, 2), reuse=st.booleans(), priority=st.integers(0, 2)
    )
    def insert(self, kinds: list[int], tail: int, space: int, reuse: bool, priority: int) -> None:
        """Check that the new part is kept and the known part is returned. With ``reuse``, offer the pages that are
        known already, as a request does that reads them."""
        namespace = self.namespaces[space % len(self.namespaces)]
        tokens = tokens_of(kinds, self.page_size, tail % self.page_size)
        known = self.known(namespace, tokens)
        offered = self.fresh(len(kinds))
        if reuse:
            offered[:, : len(known)] = self.pages(known)
        given, keys = offered.copy(), tokens.copy()
        result = self.cache.insert(keys, given, namespace, priority)
        keys[:], given[:] = -1, -1  # the arrays belong to the caller: the cache must have copied what it keeps
        self.check_insert(namespace, tokens, offered, result, known)

    @precondition(lambda self: self.matched)
    @rule(data=st.data())
    def lock(self, data: st.DataObject) -> None:
        """Lock any prefix that was found since the last eviction, regardless of the inserts in between."""
        held = data.draw(st.sampled_from(self.matched))
        self.cache.lock(held.handle)
        self.locked.append(held)

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        """Undo any lock, in any order."""
        self.cache.unlock(self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1))).handle)

    @rule(num_pages=st.integers(0, 8))
    def evict(self, num_pages: int) -> None:
        """Check that enough pages are returned, or all that are not protected."""
        promised = self.cache.evictable
        freed = self.cache.evict((num_pages,) * self.num_groups)
        assert all(len(pages) >= min(num_pages, count) for pages, count in zip(freed, promised, strict=True)), (
            "fewer pages were evicted than evictable states"
        )
        self.check_freed(freed)

    @rule()
    def reset(self) -> None:
        """Check that all pages that are not protected are returned."""
        self.check_freed(self.cache.reset())
        assert set(self.kept) == self.protected, "reset kept a prefix that is not locked"

    @invariant()
    def counters_are_right(self) -> None:
        """Check the cache's own integrity, and compare its counters with the expected ones."""
        self.cache.check_integrity()
        total = (len(self.kept),) * self.num_groups
        assert self.cache.total == total, "total is not the number of pages that the cache keeps"
        evictable = (len(self.kept) - len(self.protected),) * self.num_groups
        assert self.cache.evictable == evictable, "evictable is not the number of pages without a lock"

    def teardown(self) -> None:
        """Unlock and drop everything, and check that nothing is left."""
        for held in self.locked:
            self.cache.unlock(held.handle)
        self.locked.clear()
        self.reset()
        self.counters_are_right()

    def fresh(self, count: int) -> IntArray:
        """Return new pages ``[groups, count]``; no number is ever used twice."""
        first = self.next_page
        self.next_page += count * self.num_groups
        return np.arange(first, self.next_page, dtype=np.int32).reshape(self.num_groups, count)

    def known(self, namespace: str, tokens: IntArray) -> list[Prefix]:
        """Return the prefixes of ``tokens`` that are kept."""
        return [prefix for prefix in prefixes_of(namespace, tokens, self.page_size) if prefix in self.kept]

    def pages(self, prefixes: list[Prefix]) -> IntArray:
        """Return the pages ``[groups, n]`` of ``prefixes``."""
        columns = [self.kept[prefix] for prefix in prefixes]
        return np.array(columns, dtype=np.int32).reshape(len(prefixes), self.num_groups).T

    def check_match(self, found: Match, known: list[Prefix]) -> None:
        """Assert that ``found`` is exactly the prefixes ``known``."""
        assert found.length == len(known) * self.page_size, "not the longest cached prefix"
        assert found.reached == (found.length,) * self.num_groups
        assert found.common >= found.length, "the key agrees with more than common says"
        assert found.pages.dtype == np.int32
        assert np.array_equal(found.pages, self.pages(known)), "these pages hold other tokens, or were never offered"

    def check_insert(
        self, namespace: str, tokens: IntArray, offered: IntArray, result: Match, known: list[Prefix]
    ) -> None:
        """Assert that the known pages are returned, and that the other pages that were kept are the offered ones."""
        kept = result.pages.shape[1]
        assert len(known) <= kept <= offered.shape[1], "insert lost a prefix, or returned one that does not exist"
        assert result.length == kept * self.page_size
        prefixes = prefixes_of(namespace, tokens, self.page_size)[:kept]
        self.kept.update(zip(prefixes[len(known) :], columns_of(offered)[len(known) : kept], strict=True))
        assert np.array_equal(result.pages, self.pages(prefixes)), (
            "insert replaced a page, or kept a page that was not offered"
        )
        self.matched.append(LockedHandle(result.handle, frozenset(prefixes)))

    def check_freed(self, freed: list[IntArray]) -> None:
        """Assert that freed pages were kept, are freed once, are not protected, and that no remaining prefix has lost
        its beginning."""
        self.matched.clear()
        columns = columns_of(np.stack(freed))
        assert len(set(columns)) == len(columns), "a page was freed twice"
        assert set(columns) <= set(self.kept.values()), "a page was freed that the cache does not own"
        gone = {prefix for prefix, column in self.kept.items() if column in set(columns)}
        assert not gone & self.protected, "a locked prefix was evicted"
        self.kept = {prefix: column for prefix, column in self.kept.items() if prefix not in gone}
        page = self.page_size * np.dtype(np.int32).itemsize
        for namespace, tokens in self.kept:
            assert len(tokens) == page or (namespace, tokens[:-page]) in self.kept, "a prefix lost its beginning"
