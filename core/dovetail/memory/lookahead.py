"""Wrap a prefix cache for drafters whose keys and values at a position also depend on the tokens after it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.interfaces.cache import CacheContext, Match, PrefixCache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dovetail.types import IntArray


def with_lookahead(
    build: Callable[[CacheContext], PrefixCache], context: CacheContext, tokens_ahead: int
) -> PrefixCache:
    """Return the prefix cache that ``build`` makes, in which the ``tokens_ahead`` tokens after a page are part of the
    page's key."""
    if tokens_ahead == 0:
        return build(context)
    width = 1 + tokens_ahead
    # the window of the same columns: its tokens before the last one are counted in keys of ``width`` tokens
    groups = [
        group if group.window is None else replace(group, window=(group.window - 1) * width + 1)
        for group in context.groups
    ]
    wide = CacheContext(context.page_size * width, tuple(groups))
    return LookaheadCache(build(wide), context.page_size, tokens_ahead)


class LookaheadCache(PrefixCache):
    """Identify each position by its token and the ``ahead`` tokens after it. A page is then found only for prompts that
    also continue with the same tokens.

    ``cache`` keeps the pages. Its keys hold ``1 + ahead`` tokens for each position, and its pages have ``1 + ahead``
    times as many entries. The last ``ahead`` positions of a key cannot be identified, because the tokens after them are
    not known. A page that contains such a position is neither kept nor found.
    """

    def __init__(self, cache: PrefixCache, page_size: int, ahead: int) -> None:
        """Wrap ``cache``, which was built with the page size ``page_size * (1 + ahead)``. ``page_size`` is the number
        of tokens per page."""
        self._cache, self._page_size, self._width = cache, page_size, 1 + ahead

    def match(self, tokens: IntArray, namespace: str = "") -> Match:
        """Return the longest cached prefix after which ``tokens`` continue with the same tokens as the request that
        computed it."""
        return self._in_tokens(self._cache.match(self._keys(tokens), namespace))

    def insert(
        self,
        tokens: IntArray,
        pages: IntArray,
        namespace: str = "",
        priority: int = 0,
        states: IntArray | None = None,
    ) -> Match:
        """Offer those pages whose following ``ahead`` tokens are in ``tokens``, and the snapshots if the tokens after
        them are known too; see ``PrefixCache.insert``."""
        keys = self._keys(tokens)
        kept = pages[:, : len(keys) // (self._width * self._page_size)]
        known = states if kept.shape[1] == pages.shape[1] else None
        return self._in_tokens(self._cache.insert(keys, kept, namespace, priority, known))

    def lock(self, handle: Any) -> None:
        """See ``PrefixCache``."""
        self._cache.lock(handle)

    def unlock(self, handle: Any) -> None:
        """See ``PrefixCache``."""
        self._cache.unlock(handle)

    def evict(self, short: Sequence[int]) -> list[IntArray]:
        """See ``PrefixCache``."""
        return self._cache.evict(short)

    def evict_unneeded(self, most: Sequence[int]) -> list[IntArray]:
        """See ``PrefixCache``."""
        return self._cache.evict_unneeded(most)

    def reset(self) -> list[IntArray]:
        """See ``PrefixCache``."""
        return self._cache.reset()

    def shared_prefixes(self, handles: Sequence[Any]) -> list[tuple[list[int], int]]:
        """See ``PrefixCache``."""
        return [(rows, length // self._width) for rows, length in self._cache.shared_prefixes(handles)]

    @property
    def evictable(self) -> tuple[int, ...]:
        """See ``PrefixCache``."""
        return self._cache.evictable

    @property
    def total(self) -> tuple[int, ...]:
        """See ``PrefixCache``."""
        return self._cache.total

    def check_integrity(self) -> None:
        """See ``PrefixCache``."""
        self._cache.check_integrity()

    def _keys(self, tokens: IntArray) -> IntArray:
        positions = len(tokens) - self._width + 1
        if positions <= 0:
            return tokens[:0]
        return np.lib.stride_tricks.sliding_window_view(tokens, self._width).reshape(-1)

    def _in_tokens(self, match: Match) -> Match:
        reached = tuple(length // self._width for length in match.reached)
        length, common = match.length // self._width, match.common // self._width
        return match._replace(length=length, reached=reached, common=common)
