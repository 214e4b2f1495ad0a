"""A prefix cache for drafters whose keys and values at a place depend on the token after it, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.interfaces.cache import Match, PrefixCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.types import IntArray

PAIR = 2
"""Tokens by which ``PairCache`` knows a place."""


class PairCache(PrefixCache):
    """Knows each place by its token and the one after it, so that a page is only found for texts that also go on with the same
    token. ``cache`` keeps the pages; its keys are the pairs of a text one after the other, so that its pages are ``PAIR *
    page_size`` tokens long. Of n tokens n - 1 places are known: a page is kept, and found, if the token behind it is there too.
    """

    def __init__(self, cache: PrefixCache, page_size: int) -> None:
        """``page_size`` counts tokens of texts."""
        self._cache, self._page_size = cache, page_size

    def match(self, tokens: IntArray, namespace: str = "") -> Match:
        """The longest cached prefix behind which ``tokens`` go on as they did for whoever computed it."""
        return _halved(self._cache.match(_pairs(tokens), namespace))

    def insert(self, tokens: IntArray, pages: IntArray, namespace: str = "", priority: int = 0) -> Match:
        """Keeps pages as far as the token behind them is among ``tokens``."""
        pairs = _pairs(tokens)
        kept = pages[:, : len(pairs) // (PAIR * self._page_size)]
        return _halved(self._cache.insert(pairs, kept, namespace, priority))

    def lock(self, handle: Any) -> None:
        """See ``PrefixCache``."""
        self._cache.lock(handle)

    def unlock(self, handle: Any) -> None:
        """See ``PrefixCache``."""
        self._cache.unlock(handle)

    def evict(self, num_pages: int) -> IntArray:
        """See ``PrefixCache``."""
        return self._cache.evict(num_pages)

    def reset(self) -> IntArray:
        """See ``PrefixCache``."""
        return self._cache.reset()

    def shared_prefixes(self, handles: Sequence[Any]) -> list[tuple[list[int], int]]:
        """See ``PrefixCache``."""
        return [(rows, length // PAIR) for rows, length in self._cache.shared_prefixes(handles)]

    @property
    def evictable_pages(self) -> int:
        """See ``PrefixCache``."""
        return self._cache.evictable_pages

    @property
    def total_pages(self) -> int:
        """See ``PrefixCache``."""
        return self._cache.total_pages

    def check_integrity(self) -> None:
        """See ``PrefixCache``."""
        self._cache.check_integrity()


def _pairs(tokens: IntArray) -> IntArray:
    return np.stack((tokens[:-1], tokens[1:]), 1).reshape(-1)


def _halved(match: Match) -> Match:
    return match._replace(length=match.length // PAIR)
