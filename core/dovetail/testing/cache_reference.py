"""Implement a prefix cache as dictionaries from prefixes to pages and snapshots. It is slow and simple, and serves as a
reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dovetail.interfaces.cache import CacheContext, Match, PrefixCache, first_needed
from dovetail.interfaces.cache_groups import resumable
from dovetail.types import IntArray

Prefix = tuple[str, bytes]


class ReferenceCache(PrefixCache):
    """Keep one entry per page or snapshot and group. A handle is the tuple of the prefixes on its path. Evicts the
    entries of the longest prefixes first."""

    def __init__(self, config: object, context: CacheContext) -> None:
        """Create an empty cache. ``config`` is not read."""
        self._page_size, self._groups = context.page_size, context.groups
        self._paged = [number for number, group in enumerate(context.groups) if group.paged]
        self._states = [number for number, group in enumerate(context.groups) if not group.paged]
        self._held: list[dict[Prefix, int]] = [{} for _ in context.groups]
        self._locks: list[Counter[Prefix]] = [Counter() for _ in context.groups]

    def match(self, tokens: IntArray, namespace: str = "") -> Match:
        """Return the prefixes up to the largest length that all groups accept."""
        path = self._path(tokens, namespace)
        length, reached = self._resumable(path)
        path = path[: length // self._page_size]
        pages = self._pages(path)
        for row, number in enumerate(self._paged):
            pages[row, : first_needed(self._groups[number], length, self._page_size)] = 0
        return Match(length, pages, tuple(path), self._snapshots(path), reached, max(reached))

    def insert(
        self,
        tokens: IntArray,
        pages: IntArray,
        namespace: str = "",
        priority: int = 0,
        states: IntArray | None = None,
    ) -> Match:
        """Keep each page and snapshot that is not kept yet."""
        path = self._path(tokens, namespace)
        for number, row in zip(self._paged, pages.tolist(), strict=True):
            for prefix, page in zip(path, row, strict=True):
                if page:
                    self._held[number].setdefault(prefix, page)
        if states is not None and path:
            for number, snapshot in zip(self._states, states.tolist(), strict=True):
                if snapshot:
                    self._held[number].setdefault(path[-1], snapshot)
        length = len(path) * self._page_size
        return Match(length, self._pages(path), tuple(path), self._snapshots(path), self._resumable(path)[1], length)

    def lock(self, handle: Any) -> None:
        """Add one lock to each entry that is needed at the end of the path."""
        for number, prefixes in enumerate(self._needed(handle)):
            self._locks[number].update(prefixes)

    def unlock(self, handle: Any) -> None:
        """Remove one lock from each entry that is needed at the end of the path."""
        for number, prefixes in enumerate(self._needed(handle)):
            self._locks[number].subtract(prefixes)
            assert all(self._locks[number][prefix] >= 0 for prefix in prefixes)

    def evict(self, short: Sequence[int]) -> list[IntArray]:
        """Drop the entries of the longest prefixes first, so that no prefix loses its beginning."""
        freed = []
        for number, (held, count) in enumerate(zip(self._held, short, strict=True)):
            gone = sorted(self._free(number), key=lambda prefix: len(prefix[1]), reverse=True)[:count]
            freed.append(np.array([held.pop(prefix) for prefix in gone], np.int32))
        return freed

    def reset(self) -> list[IntArray]:
        """Drop everything that is not locked."""
        return self.evict(self.total)

    @property
    def evictable(self) -> tuple[int, ...]:
        """Return the number of entries without a lock."""
        return tuple(len(self._free(number)) for number in range(len(self._groups)))

    @property
    def total(self) -> tuple[int, ...]:
        """Return the number of entries."""
        return tuple(map(len, self._held))

    def _free(self, number: int) -> list[Prefix]:
        return [prefix for prefix in self._held[number] if not self._locks[number][prefix]]

    def _path(self, tokens: IntArray, namespace: str) -> list[Prefix]:
        ends = range(self._page_size, len(tokens) + 1, self._page_size)
        return [(namespace, tokens[:end].tobytes()) for end in ends]

    def _resumable(self, path: Sequence[Prefix]) -> tuple[int, tuple[int, ...]]:
        present = []
        for group, held in zip(self._groups, self._held, strict=True):
            have = [prefix in held for prefix in path]
            present.append(np.array(have if group.paged else [False, *have], np.bool_))
        return resumable(self._groups, present, self._page_size)

    def _needed(self, path: Sequence[Prefix]) -> Iterator[Sequence[Prefix]]:
        """Yield for each group the prefixes whose entries are needed at the end of a path."""
        for group in self._groups:
            first = first_needed(group, len(path) * self._page_size, self._page_size)
            yield path[first:] if group.paged else path[-1:]

    def _pages(self, path: Sequence[Prefix]) -> IntArray:
        pages = [[self._held[number].get(prefix, 0) for prefix in path] for number in self._paged]
        return np.array(pages, np.int32).reshape(len(self._paged), len(path))

    def _snapshots(self, path: Sequence[Prefix]) -> IntArray | None:
        if not self._states:
            return None
        return np.array([self._held[number].get(path[-1], 0) if path else 0 for number in self._states], np.int32)
