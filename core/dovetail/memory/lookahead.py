"""A prefix cache for drafters whose keys and values at a place depend on the tokens after it, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.interfaces.cache import CacheContext, Match, PrefixCache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dovetail.types import IntArray


def with_lookahead(build: Callable[[CacheContext], PrefixCache], page_size: int, tokens_ahead: int) -> PrefixCache:
    """The prefix cache that ``build`` makes, in which ``tokens_ahead`` tokens behind a page count as well."""
    if tokens_ahead == 0:
        return build(CacheContext(page_size))
    return LookaheadCache(build(CacheContext(page_size * (1 + tokens_ahead))), page_size, tokens_ahead)


class LookaheadCache(PrefixCache):
    """Knows each place by its token and the ``ahead`` tokens after it, so that a page is only found for texts that also go on with
    the same tokens. ``cache`` keeps the pages; its keys are these tokens of one place after the other, its pages ``1 + ahead`` times
    as long. Of a text the last ``ahead`` places are not known: pages are kept and found as far as the tokens behind them are given.
    """

    def __init__(self, cache: PrefixCache, page_size: int, ahead: int) -> None:
        """``page_size`` counts tokens of texts; ``cache`` was built for pages ``1 + ahead`` times as long."""
        self._cache, self._page_size, self._width = cache, page_size, 1 + ahead

    def match(self, tokens: IntArray, namespace: str = "") -> Match:
        """The longest cached prefix behind which ``tokens`` go on as they did for whoever computed it."""
        return self._in_tokens(self._cache.match(self._keys(tokens), namespace))

    def insert(self, tokens: IntArray, pages: IntArray, namespace: str = "", priority: int = 0) -> Match:
        """Keeps pages as far as the tokens behind them are among ``tokens``."""
        keys = self._keys(tokens)
        kept = pages[:, : len(keys) // (self._width * self._page_size)]
        return self._in_tokens(self._cache.insert(keys, kept, namespace, priority))

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
        return [(rows, length // self._width) for rows, length in self._cache.shared_prefixes(handles)]

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

    def _keys(self, tokens: IntArray) -> IntArray:
        places = len(tokens) - self._width + 1
        if places <= 0:
            return tokens[:0]
        return np.lib.stride_tricks.sliding_window_view(tokens, self._width).reshape(-1)

    def _in_tokens(self, match: Match) -> Match:
        return match._replace(length=match.length // self._width)
