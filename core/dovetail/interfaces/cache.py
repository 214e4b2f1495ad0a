"""KV memory: the pool is tensors, the prefix cache is an index over their pages. Two different parts."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from pydantic import BaseModel

    from dovetail.types import IntArray


class CacheGroupKind(enum.StrEnum):
    """How the layers of a group keep their past."""

    FULL = "full"
    SLIDING = "sliding"
    LATENT = "latent"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one kind of KV memory. A model declares its groups; a pool is built for each."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    kind: CacheGroupKind = CacheGroupKind.FULL
    window: int | None = None


class KVPool(ABC):
    """Keys and values of one cache group, in pages. Page 0 belongs to nobody: padding rows may write there.

    ``k[layer]`` and ``v[layer]`` are ``[num_pages, page_size, num_kv_heads, head_dim]``, contiguous, and hold what was stored
    but for a conversion to their dtype: on CUDA a kernel that has rotated keys in registers writes them there itself, in
    place of calling ``store``.
    """

    num_pages: int
    page_size: int

    @abstractmethod
    def keys(self, layer_id: int) -> torch.Tensor:
        """Keys of a layer, ``[num_pages, page_size, num_kv_heads, head_dim]``."""

    @abstractmethod
    def values(self, layer_id: int) -> torch.Tensor:
        """Values of a layer, ``[num_pages, page_size, num_kv_heads, head_dim]``."""

    @abstractmethod
    def store(self, layer_id: int, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor) -> None:
        """Write ``k, v [tokens, num_kv_heads, head_dim]`` to token places ``out_loc [tokens]`` (page * page_size +
        offset). Mutates the pool."""

    @abstractmethod
    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy every layer's keys and values from token places ``source [n]`` to ``target [n]``, as if all were read
        before any is written. Mutates the pool."""


class Match(NamedTuple):
    """The longest cached prefix of a key.

    ``pages`` int32 ``[groups, n]`` are owned by the cache and may be read while ``handle`` is locked; ``length`` is the
    number of tokens they hold, ``n * page_size``.
    """

    length: int
    pages: IntArray
    handle: Any


@dataclass(frozen=True, slots=True)
class CacheContext:
    """What a prefix cache is built for."""

    page_size: int
    num_groups: int = 1


class PrefixCache(ABC):
    """An index from (namespace, tokens) to pages. CPU only.

    Pages are handed over, never copied: ``insert`` gives pages to the cache, ``evict`` and ``reset`` give them back to
    the caller, who returns them to the allocator. A locked handle protects its whole path from eviction. Keys are int32
    arrays and are compared whole. Only full pages are kept: the tail of a key beyond a multiple of ``page_size`` stays
    with the caller. Not thread-safe.
    """

    def __init__(self, config: BaseModel, context: CacheContext) -> None:
        """``config`` is this cache's own section."""

    @abstractmethod
    def match(self, tokens: IntArray, namespace: str = "") -> Match:
        """The longest cached prefix of ``tokens``. Touches recency; locks nothing."""

    @abstractmethod
    def insert(self, tokens: IntArray, pages: IntArray, namespace: str = "", priority: int = 0) -> Match:
        """Offer ``pages [groups, len(tokens) // page_size]`` for ``tokens``.

        Returns the path that now holds them. Where ``result.pages[:, i] != pages[:, i]`` the cache had that page before
        and the offered one stays the caller's (to free, once its rows read the cached one instead); the others are now
        the cache's. A cache may keep less than it is offered: pages from column ``result.pages.shape[1]`` on stay the
        caller's. Copies what it keeps of ``tokens`` and ``pages``. Locks nothing.
        """

    @abstractmethod
    def lock(self, handle: Any) -> None:
        """Protect the path of ``handle`` from eviction; counted, so each lock needs its unlock."""

    @abstractmethod
    def unlock(self, handle: Any) -> None:
        """Undo one ``lock``."""

    @abstractmethod
    def evict(self, num_pages: int) -> IntArray:
        """Forget unlocked prefixes, leaves first, until at least ``num_pages`` pages are free or none is left.
        Returns the pages ``[groups, n]``, the caller's again."""

    @abstractmethod
    def reset(self) -> IntArray:
        """Forget everything that is not locked; returns its pages ``[groups, n]``."""

    def shared_prefixes(self, handles: Sequence[Any]) -> list[tuple[list[int], int]]:
        """Which of these paths begin alike, each of them locked once for its place in ``handles``: groups of two and more
        indices into ``handles``, each with the number of tokens (a multiple of ``page_size``) that all of the group hold in
        the same pages. An index is in one group at most; the groups are those that save most: the sum of (rows - 1) *
        tokens. Needs ``cache.shared_prefixes``."""
        return []

    @property
    @abstractmethod
    def evictable_pages(self) -> int:
        """Pages that ``evict`` could return now."""

    @property
    @abstractmethod
    def total_pages(self) -> int:
        """Pages the cache owns, locked or not."""

    def check_integrity(self) -> None:
        """Assert the cache's own invariants; called when idle and by tests. Linear in its size."""
