"""A prefix cache against a dictionary: random calls, and after each one everything that must hold."""

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
"""A namespace, and the tokens of one or more whole pages."""


def tokens_of(kinds: Sequence[int], page_size: int, tail: int = 0) -> IntArray:
    """One page for each of ``kinds``, then ``tail`` more tokens. Kind 0 is all zeros; kinds 1 and 2 differ from it in
    the last and in the first token only."""
    pages = np.zeros((len(kinds), page_size), dtype=np.int32)
    pages[:, -1] = np.where(np.equal(kinds, 1), 1, pages[:, -1]) if len(kinds) else 0
    pages[:, 0] = np.where(np.equal(kinds, 2), 2, pages[:, 0]) if len(kinds) else 0
    return np.concatenate([pages.ravel(), np.zeros(tail, dtype=np.int32)])


def prefixes_of(namespace: str, tokens: IntArray, page_size: int) -> list[Prefix]:
    """The whole-page prefixes of ``tokens``, shortest first."""
    whole = len(tokens) // page_size
    return [(namespace, tokens[: count * page_size].tobytes()) for count in range(1, whole + 1)]


def columns_of(pages: IntArray) -> list[Column]:
    """``pages [groups, n]`` as n columns."""
    return [tuple(column) for column in pages.T.tolist()]


class LockedHandle(NamedTuple):
    """A handle, and the prefixes that it protects once it is locked."""

    handle: Any
    prefixes: frozenset[Prefix]


class PrefixCacheMachine(RuleBasedStateMachine):
    """Plays the scheduler and the allocator at once.

    ``kept`` is the truth: which column of pages the cache must hold for which prefix. Pages are numbered without end,
    so that a page that turns up twice, or that nobody offered, is seen at once.
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
        self.matched: list[LockedHandle] = []  # matched or inserted, not locked; good until the next eviction

    @property
    def protected(self) -> set[Prefix]:
        """Prefixes that no eviction may take."""
        return {prefix for held in self.locked for prefix in held.prefixes}

    @rule(kinds=KINDS, tail=st.integers(0, 15), space=st.integers(0, 2))
    def match(self, kinds: list[int], tail: int, space: int) -> None:
        """Finds exactly the longest prefix that is kept, with its pages."""
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
        """Keeps what is new, and hands out what it had. ``reuse`` offers the pages that are known already, as a request
        does that read them."""
        namespace = self.namespaces[space % len(self.namespaces)]
        tokens = tokens_of(kinds, self.page_size, tail % self.page_size)
        known = self.known(namespace, tokens)
        offered = self.fresh(len(kinds))
        if reuse:
            offered[:, : len(known)] = self.pages(known)
        given, keys = offered.copy(), tokens.copy()
        result = self.cache.insert(keys, given, namespace, priority)
        keys[:], given[:] = -1, -1  # they are the caller's arrays: the cache must have copied what it keeps
        self.check_insert(namespace, tokens, offered, result, known)

    @precondition(lambda self: self.matched)
    @rule(data=st.data())
    def lock(self, data: st.DataObject) -> None:
        """Lock any prefix that was found since the last eviction, whatever was inserted in between."""
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
        """Returns enough pages, or all that are not protected."""
        promised = self.cache.evictable_pages
        freed = self.cache.evict(num_pages)
        assert freed.shape[1] >= min(num_pages, promised), "fewer pages were evicted than evictable_pages promised"
        self.check_freed(freed)

    @rule()
    def reset(self) -> None:
        """Returns all that is not protected."""
        self.check_freed(self.cache.reset())
        assert set(self.kept) == self.protected, "reset kept a prefix that is not locked"

    @invariant()
    def counters_are_right(self) -> None:
        """The cache's own integrity, and its counters against the truth."""
        self.cache.check_integrity()
        assert self.cache.total_pages == len(self.kept), "total_pages is not what the cache was given and keeps"
        evictable = len(self.kept) - len(self.protected)
        assert self.cache.evictable_pages == evictable, "evictable_pages is not what is under no lock"

    def teardown(self) -> None:
        """Unlock and forget everything: nothing may be left over."""
        for held in self.locked:
            self.cache.unlock(held.handle)
        self.locked.clear()
        self.reset()
        self.counters_are_right()

    def fresh(self, count: int) -> IntArray:
        """New pages ``[groups, count]``; no number is ever used twice."""
        first = self.next_page
        self.next_page += count * self.num_groups
        return np.arange(first, self.next_page, dtype=np.int32).reshape(self.num_groups, count)

    def known(self, namespace: str, tokens: IntArray) -> list[Prefix]:
        """The prefixes of ``tokens`` that are kept."""
        return [prefix for prefix in prefixes_of(namespace, tokens, self.page_size) if prefix in self.kept]

    def pages(self, prefixes: list[Prefix]) -> IntArray:
        """Their pages ``[groups, n]``."""
        columns = [self.kept[prefix] for prefix in prefixes]
        return np.array(columns, dtype=np.int32).reshape(len(prefixes), self.num_groups).T

    def check_match(self, found: Match, known: list[Prefix]) -> None:
        """``found`` must be exactly the prefixes ``known``."""
        assert found.length == len(known) * self.page_size, "not the longest cached prefix"
        assert found.pages.dtype == np.int32
        assert np.array_equal(found.pages, self.pages(known)), "these pages hold other tokens, or are nobody's"

    def check_insert(
        self, namespace: str, tokens: IntArray, offered: IntArray, result: Match, known: list[Prefix]
    ) -> None:
        """The pages that were known come back; those kept of the others are the offered ones."""
        kept = result.pages.shape[1]
        assert len(known) <= kept <= offered.shape[1], "insert lost a prefix, or made one up"
        assert result.length == kept * self.page_size
        prefixes = prefixes_of(namespace, tokens, self.page_size)[:kept]
        self.kept.update(zip(prefixes[len(known) :], columns_of(offered)[len(known) : kept], strict=True))
        assert np.array_equal(result.pages, self.pages(prefixes)), (
            "insert replaced a page, or kept another than offered"
        )
        self.matched.append(LockedHandle(result.handle, frozenset(prefixes)))

    def check_freed(self, freed: IntArray) -> None:
        """Freed pages were kept, once, are not protected, and leave no prefix without its beginning."""
        self.matched.clear()
        columns = columns_of(freed)
        assert len(set(columns)) == len(columns), "a page was freed twice"
        assert set(columns) <= set(self.kept.values()), "a page was freed that the cache does not own"
        gone = {prefix for prefix, column in self.kept.items() if column in set(columns)}
        assert not gone & self.protected, "a locked prefix was evicted"
        self.kept = {prefix: column for prefix, column in self.kept.items() if prefix not in gone}
        page = self.page_size * np.dtype(np.int32).itemsize
        for namespace, tokens in self.kept:
            assert len(tokens) == page or (namespace, tokens[:-page]) in self.kept, "a prefix lost its beginning"
