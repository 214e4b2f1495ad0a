"""Provide the prefix cache that keeps nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from dovetail.interfaces.cache import CacheContext, Match, PrefixCache
from dovetail.types import IntArray
from dovetail_cache.config import NoneConfig


class NoCache(PrefixCache):
    """Never match and never keep a page: all offered pages still belong to the caller."""

    def __init__(self, config: NoneConfig, context: CacheContext) -> None:
        """Create the cache. ``config`` has no settings."""
        self._num_groups = context.num_groups

    def _no_pages(self) -> IntArray:
        return np.empty((self._num_groups, 0), dtype=np.int32)

    def match(self, tokens: IntArray, namespace: str = "") -> Match:
        """Return an empty match."""
        return Match(0, self._no_pages(), None)

    def insert(self, tokens: IntArray, pages: IntArray, namespace: str = "", priority: int = 0) -> Match:
        """Keep nothing and return an empty match."""
        return Match(0, self._no_pages(), None)

    def lock(self, handle: Any) -> None:
        """Do nothing: there is nothing to protect."""

    def unlock(self, handle: Any) -> None:
        """Do nothing: there is nothing to release."""

    def evict(self, num_pages: int) -> IntArray:
        """Return no pages."""
        return self._no_pages()

    def reset(self) -> IntArray:
        """Return no pages."""
        return self._no_pages()

    @property
    def evictable_pages(self) -> int:
        """Return 0."""
        return 0

    @property
    def total_pages(self) -> int:
        """Return 0."""
        return 0
