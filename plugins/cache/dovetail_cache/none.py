"""Provide the prefix cache that keeps nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dovetail.interfaces.cache import CacheContext, Match, PrefixCache
from dovetail.types import IntArray
from dovetail_cache.config import NoneConfig


class NoCache(PrefixCache):
    """Never match and never keep a page or a snapshot: everything that is offered still belongs to the caller."""

    def __init__(self, config: NoneConfig, context: CacheContext) -> None:
        """Create the cache. ``config`` has no settings."""
        self._zeros = (0,) * len(context.groups)
        self._num_paged = context.num_paged

    def _match(self) -> Match:
        num_states = len(self._zeros) - self._num_paged
        states = np.zeros(num_states, np.int32) if num_states else None
        return Match(0, np.empty((self._num_paged, 0), np.int32), None, states, self._zeros)

    def match(self, tokens: IntArray, namespace: str = "") -> Match:
        """Return an empty match."""
        return self._match()

    def insert(
        self,
        tokens: IntArray,
        pages: IntArray,
        namespace: str = "",
        priority: int = 0,
        states: IntArray | None = None,
    ) -> Match:
        """Keep nothing and return an empty match."""
        return self._match()

    def lock(self, handle: Any) -> None:
        """Do nothing: there is nothing to protect."""

    def unlock(self, handle: Any) -> None:
        """Do nothing: there is nothing to release."""

    def evict(self, short: Sequence[int]) -> list[IntArray]:
        """Return no pages."""
        return [np.empty(0, np.int32) for _ in self._zeros]

    def reset(self) -> list[IntArray]:
        """Return no pages."""
        return self.evict(self._zeros)

    @property
    def evictable(self) -> tuple[int, ...]:
        """Return 0 for each group."""
        return self._zeros

    @property
    def total(self) -> tuple[int, ...]:
        """Return 0 for each group."""
        return self._zeros
