"""Implement a prefix cache as a dictionary from prefixes to pages. It is slow and simple, and serves as a reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from dovetail.interfaces.cache import CacheContext, Match, PrefixCache
from dovetail.types import IntArray

Prefix = tuple[str, bytes]


class ReferenceCache(PrefixCache):
    """Keep one entry per page. A handle is the tuple of the prefixes on its path. Evicts the longest prefixes first."""

    def __init__(self, config: object, context: CacheContext) -> None:
        """Create an empty cache. ``config`` is not read."""
        self._page_size = context.page_size
        self._num_groups = context.num_paged
        self._columns: dict[Prefix, tuple[int, ...]] = {}
        self._locks: Counter[Prefix] = Counter()

    def match(self, tokens: IntArray, namespace: str = "") -> Match:
        """Return the prefixes of ``tokens`` that are kept, up to the first that is not."""
        path = []
        for end in range(self._page_size, len(tokens) + 1, self._page_size):
            prefix = (namespace, tokens[:end].tobytes())
            if prefix not in self._columns:
                break
            path.append(prefix)
        length = len(path) * self._page_size
        return Match(length, self._pages(path), tuple(path), reached=(length,) * self._num_groups)

    def insert(
        self,
        tokens: IntArray,
        pages: IntArray,
        namespace: str = "",
        priority: int = 0,
        states: IntArray | None = None,
    ) -> Match:
        """Keep each column whose prefix is not kept yet."""
        for index, column in enumerate(pages.T.tolist()):
            prefix = (namespace, tokens[: (index + 1) * self._page_size].tobytes())
            self._columns.setdefault(prefix, tuple(column))
        return self.match(tokens, namespace)

    def lock(self, handle: Any) -> None:
        """Add one lock to each prefix of the path."""
        assert all(prefix in self._columns for prefix in handle)
        self._locks.update(handle)

    def unlock(self, handle: Any) -> None:
        """Remove one lock from each prefix of the path."""
        self._locks.subtract(handle)
        assert all(self._locks[prefix] >= 0 for prefix in handle)

    def evict(self, short: Sequence[int]) -> list[IntArray]:
        """Drop the longest prefixes first, so that no prefix loses its beginning."""
        gone = sorted(self._free(), key=lambda prefix: len(prefix[1]), reverse=True)[: max(short)]
        pages = self._pages(gone)
        for prefix in gone:
            del self._columns[prefix]
        return list(pages)

    def reset(self) -> list[IntArray]:
        """Drop everything that is not locked."""
        return self.evict(self.total)

    @property
    def evictable(self) -> tuple[int, ...]:
        """Return the number of prefixes without a lock."""
        return (len(self._free()),) * self._num_groups

    @property
    def total(self) -> tuple[int, ...]:
        """Return the number of prefixes."""
        return (len(self._columns),) * self._num_groups

    def _free(self) -> list[Prefix]:
        return [prefix for prefix in self._columns if not self._locks[prefix]]

    def _pages(self, path: list[Prefix]) -> IntArray:
        columns = [self._columns[prefix] for prefix in path]
        return np.array(columns, dtype=np.int32).reshape(len(path), self._num_groups).T
