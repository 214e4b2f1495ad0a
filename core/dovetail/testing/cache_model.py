"""Check every call of a prefix cache of any groups against dictionaries: the page and the snapshot of every prefix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from dovetail.interfaces.cache import CacheContext, CacheGroupKind, GroupDescriptor, Match, PrefixCache
from dovetail.testing.cache_machine import Prefix, prefixes_of
from dovetail.types import IntArray

FULL = GroupDescriptor()
LATENT = GroupDescriptor(CacheGroupKind.LATENT)
STATE = GroupDescriptor(CacheGroupKind.STATE, num_bytes=50)


def sliding(window: int) -> GroupDescriptor:
    """Return a sliding group."""
    return GroupDescriptor(CacheGroupKind.SLIDING, window)


class Held(NamedTuple):
    """Hold a handle, and the prefixes of its path, shortest first."""

    handle: Any
    prefixes: tuple[Prefix, ...]


class CacheModel:
    """Make the calls of ``cache``, and assert that each does what the dictionaries say.

    ``held[group]`` maps each prefix to what the group must hold for its last page of tokens: a page, or a snapshot at
    its end. The numbers that are offered are never used twice.
    """

    def __init__(self, cache: PrefixCache, context: CacheContext) -> None:
        self.cache, self.page_size, self.groups = cache, context.page_size, context.groups
        self.paged = [number for number, group in enumerate(context.groups) if group.paged]
        self.states = [number for number, group in enumerate(context.groups) if not group.paged]
        self.held: list[dict[Prefix, int]] = [{} for _ in context.groups]
        self.locked: list[Held] = []
        self.found: list[Held] = []  # matched or inserted, not locked; valid until the next eviction
        self._next = 1

    def fresh(self, columns: int, holes: Iterable[tuple[int, int]] = ()) -> IntArray:
        """Return new pages ``[paged groups, columns]``. ``holes`` are (group, column) that are 0, and are ignored in full
        and latent groups."""
        pages = np.arange(self._next, self._next + len(self.paged) * columns, dtype=np.int32)
        self._next += len(pages)
        pages = pages.reshape(len(self.paged), columns)
        for row, column in holes:
            if row < len(self.paged) and column < columns and not self.groups[self.paged[row]].dense:
                pages[row, column] = 0
        return pages

    def fresh_states(self) -> IntArray:
        """Return new snapshots, one for each state group."""
        self._next += len(self.states)
        return np.arange(self._next - len(self.states), self._next, dtype=np.int32)

    def match(self, tokens: IntArray, namespace: str = "") -> Match:
        """Assert that the longest prefix is found that every group accepts, with what is needed there and no more."""
        path = prefixes_of(namespace, tokens, self.page_size)
        columns = [[c for c in range(len(path) + 1) if self.accepts(g, path, c)] for g in range(len(self.groups))]
        best = max(set.intersection(*map(set, columns)))
        found = self.cache.match(tokens, namespace)
        assert found.length == best * self.page_size, "not the longest prefix that all groups accept"
        reached = tuple(max(accepted) * self.page_size for accepted in columns)
        assert found.reached == reached, "reached is not what each group accepts alone"
        assert max(reached) <= found.common <= len(path) * self.page_size
        expected = np.zeros((len(self.paged), best), np.int32)
        for row, group in enumerate(self.paged):
            for column in self.needed(group, best):
                expected[row, column] = self.held[group][path[column]]
        assert found.pages.dtype == np.int32
        assert np.array_equal(found.pages, expected), "these are not the pages that are needed for these tokens"
        self._check_states(found, path[:best])
        self.found.append(Held(found.handle, tuple(path[:best])))
        return found

    def insert(
        self,
        tokens: IntArray,
        pages: IntArray,
        namespace: str = "",
        priority: int = 0,
        states: IntArray | None = None,
    ) -> Match:
        """Assert that the cache keeps what it has, takes what it lacks, and reports both."""
        path = prefixes_of(namespace, tokens, self.page_size)
        given = tokens.copy(), pages.copy(), None if states is None else states.copy()
        result = self.cache.insert(given[0], given[1], namespace, priority, given[2])
        given[0][:], given[1][:] = -1, -1  # the arrays belong to the caller: the cache must have copied what it keeps
        kept = result.pages.shape[1]
        assert kept <= len(path)
        assert result.length == kept * self.page_size
        for row, group in enumerate(self.paged):
            for column, prefix in enumerate(path):
                offered = int(pages[row, column])
                if column < kept and offered:
                    self.held[group].setdefault(prefix, offered)
                has = int(result.pages[row, column]) if column < kept else 0
                assert has == self.held[group].get(prefix, 0), (
                    "insert replaced a page, lost one, or kept a page that was not offered"
                )
        if states is not None and kept == len(path) and path:
            for row, group in enumerate(self.states):
                if states[row]:
                    self.held[group].setdefault(path[-1], int(states[row]))
        self._check_states(result, path[:kept])
        self.found.append(Held(result.handle, tuple(path[:kept])))
        return result

    def lock(self, held: Held) -> None:
        """Lock what was found since the last eviction."""
        self.cache.lock(held.handle)
        self.locked.append(held)

    def unlock(self, index: int) -> None:
        """Undo any lock."""
        self.cache.unlock(self.locked.pop(index).handle)

    def evict(self, short: Sequence[int]) -> None:
        """Assert that each group gets what it needs, or all that is not protected."""
        promised = self.cache.evictable
        freed = self.cache.evict(short)
        for pages, count, most in zip(freed, short, promised, strict=True):
            assert len(pages) >= min(count, most), "less was evicted than evictable states"
        self._drop(freed)

    def evict_unneeded(self, most: Sequence[int]) -> None:
        """Assert that what is dropped is not protected, and that nothing is shown by an empty list."""
        freed = self.cache.evict_unneeded(most)
        assert freed == [] or any(map(len, freed)), "arrays were returned and nothing was dropped"
        if freed:
            self._drop(freed)

    def reset(self) -> None:
        """Assert that everything that is not protected is dropped."""
        self._drop(self.cache.reset())
        for group, held in enumerate(self.held):
            assert set(held) == self.protected(group), "reset kept something that is not locked"

    def check(self) -> None:
        """Compare the counters, and check the cache's own integrity."""
        self.cache.check_integrity()
        assert self.cache.total == tuple(map(len, self.held)), "total is not what the cache keeps"
        evictable = tuple(len(held) - len(self.protected(group)) for group, held in enumerate(self.held))
        assert self.cache.evictable == evictable, "evictable is not what the cache keeps without a lock"

    def close(self) -> None:
        """Unlock and drop everything, and assert that nothing is left."""
        while self.locked:
            self.unlock(-1)
        self.reset()
        self.check()
        assert self.cache.total == (0,) * len(self.groups)

    def accepts(self, number: int, path: Sequence[Prefix], columns: int) -> bool:
        """Return True if a group can resume after ``columns`` pages of tokens."""
        if not self.groups[number].paged:
            return columns == 0 or path[columns - 1] in self.held[number]
        return all(path[column] in self.held[number] for column in self.needed(number, columns))

    def needed(self, number: int, columns: int) -> list[int]:
        """Return the columns that a paged group needs: those with a token that the next token sees."""
        length, window = columns * self.page_size, self.groups[number].window
        seen = range(length) if window is None else range(max(0, length - window + 1), length)
        return sorted({token // self.page_size for token in seen})

    def protected(self, number: int) -> set[Prefix]:
        """Return the prefixes for which no eviction may drop what the group holds."""
        return {prefix for held in self.locked for prefix in self._locked_by(number, held.prefixes)} & set(
            self.held[number]
        )

    def _locked_by(self, number: int, path: Sequence[Prefix]) -> Iterator[Prefix]:
        if self.groups[number].paged:
            yield from (path[column] for column in self.needed(number, len(path)))
        elif path:
            yield path[-1]

    def _check_states(self, found: Match, path: Sequence[Prefix]) -> None:
        if self.states:
            assert found.states is not None
            expected = [self.held[group].get(path[-1], 0) if path else 0 for group in self.states]
            assert found.states.tolist() == expected, "these are not the snapshots at this length"

    def _drop(self, freed: Sequence[IntArray]) -> None:
        self.found.clear()
        assert len(freed) == len(self.groups)
        for number, (held, pages) in enumerate(zip(self.held, freed, strict=True)):
            gone = set(pages.tolist())
            assert len(gone) == len(pages), "a page was freed twice"
            assert gone <= set(held.values()), "a page was freed that the cache does not own"
            dropped = {prefix for prefix, page in held.items() if page in gone}
            assert not dropped & self.protected(number), "something was evicted that a lock protects"
            for prefix in dropped:
                del held[prefix]
        page = self.page_size * np.dtype(np.int32).itemsize
        for number, held in enumerate(self.held):
            if self.groups[number].dense:
                whole = all(len(tokens) == page or (namespace, tokens[:-page]) in held for namespace, tokens in held)
                assert whole, "a prefix lost its beginning"
