"""Provide the prefix cache ``radix``: a radix tree for the kinds of groups that the model has."""

from __future__ import annotations

from dovetail.interfaces.cache import CacheContext
from dovetail_cache.config import RadixConfig
from dovetail_cache.grouped import GroupedRadixTree
from dovetail_cache.tree import RadixTree


class RadixCache(RadixTree):
    """Keep prefixes in a radix tree. With sliding or state groups, the new object is a ``GroupedRadixTree``."""

    def __new__(cls, config: RadixConfig, context: CacheContext) -> RadixTree:
        """Return a tree for the groups of ``context``. Subclasses keep full and latent groups."""
        if cls is RadixCache and not all(group.dense for group in context.groups):
            return GroupedRadixTree(config, context)
        return object.__new__(cls)
