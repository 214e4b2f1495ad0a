"""Define the two parts of KV memory: ``KVPool`` holds the tensors, ``PrefixCache`` is an index from tokens to their
pages."""

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
    """Name how the layers of a group keep keys and values of earlier tokens."""

    FULL = "full"
    SLIDING = "sliding"
    LATENT = "latent"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Describe layers that share one kind of KV memory. A model declares its groups, and the engine builds a pool for
    each. ``window`` is the number of tokens that a sliding layer sees; None for other kinds."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    kind: CacheGroupKind = CacheGroupKind.FULL
    window: int | None = None


class KVPool(ABC):
    """Hold the keys and values of one cache group, in pages. Page 0 belongs to no request: padding rows may write
    there.

    ``keys(layer)`` and ``values(layer)`` are ``[num_pages, page_size, num_kv_heads, head_dim]``, contiguous. They hold
    what was stored, converted to their dtype and otherwise unchanged. On CUDA, a kernel that has rotated keys in
    registers writes them into these tensors directly instead of calling ``store``.
    """

    num_pages: int
    page_size: int

    @abstractmethod
    def keys(self, layer_id: int) -> torch.Tensor:
        """Return the keys of a layer, ``[num_pages, page_size, num_kv_heads, head_dim]``: the pool's own tensor, not a
        copy."""

    @abstractmethod
    def values(self, layer_id: int) -> torch.Tensor:
        """Return the values of a layer, ``[num_pages, page_size, num_kv_heads, head_dim]``: the pool's own tensor, not
        a copy."""

    @abstractmethod
    def store(self, layer_id: int, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor) -> None:
        """Write ``k`` and ``v`` (``[tokens, num_kv_heads, head_dim]`` each) to the locations ``out_loc [tokens]``. A
        location is page * page_size + offset. Called by the attention layers of the model in every forward pass.
        Mutates the pool.
        """

    @abstractmethod
    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy the keys and values of every layer from the locations ``source [n]`` to ``target [n]``, as if all were
        read before any is written. The engine calls this to move the accepted nodes of a draft tree to consecutive
        locations. Mutates the pool.
        """


class Match(NamedTuple):
    """Describe the longest cached prefix of a key.

    ``length`` is the number of tokens in the prefix, ``n * page_size``. ``pages`` (int32 ``[groups, n]``) holds their
    pages. The cache owns these pages; they may be read while ``handle`` is locked. ``handle`` is opaque to callers, who
    pass it to ``lock``, ``unlock`` and ``shared_prefixes``.
    """

    length: int
    pages: IntArray
    handle: Any


@dataclass(frozen=True, slots=True)
class CacheContext:
    """Describe what a prefix cache is built for: the tokens per page and the number of cache groups."""

    page_size: int
    num_groups: int = 1


class PrefixCache(ABC):
    """Map (namespace, tokens) to pages. Uses the CPU only. Not thread-safe: the scheduler's thread makes all calls.

    Pages change owners and are never copied: ``insert`` gives pages to the cache; ``evict`` and ``reset`` give them
    back to the caller, who returns them to the allocator. A locked handle protects its whole path, from the first page
    of the prefix to its last, from eviction. Keys are int32 arrays and are compared in full. Only full pages are kept:
    the tail of a key beyond a multiple of ``page_size`` stays with the caller.
    """

    def __init__(self, config: BaseModel, context: CacheContext) -> None:
        """Store what the cache needs of ``config``, which is this cache's own config section, and of ``context``."""

    @abstractmethod
    def match(self, tokens: IntArray, namespace: str = "") -> Match:
        """Return the longest cached prefix of ``tokens``. Updates the recency of the path; locks nothing.

        The scheduler calls this for waiting requests; prefix-aware policies call it too.
        """

    @abstractmethod
    def insert(self, tokens: IntArray, pages: IntArray, namespace: str = "", priority: int = 0) -> Match:
        """Offer ``pages [groups, len(tokens) // page_size]`` for ``tokens``, and return the path that now holds them.

        Where ``result.pages[:, i] != pages[:, i]``, the cache already had a page for these tokens, and the offered page
        still belongs to the caller, who frees it once its rows read the cached page instead. All other offered pages
        now belong to the cache. A cache may keep fewer pages than the caller offers. Pages from column
        ``result.pages.shape[1]`` on still belong to the caller. Copies what it keeps of ``tokens`` and ``pages``. Locks
        nothing.

        ``priority`` is the request's priority. The scheduler calls this when a part of a request's prompt has entered
        the pool, and when the request ends or is retracted.
        """

    @abstractmethod
    def lock(self, handle: Any) -> None:
        """Protect the path of ``handle`` from eviction. Locks are counted: each call needs its own ``unlock``.

        A request locks its path from admission until it leaves the table; groups and sessions lock theirs while they
        are pinned. No ``evict`` or ``reset`` may come between the ``match`` or ``insert`` that returned an unlocked
        handle and its first ``lock``.
        """

    @abstractmethod
    def unlock(self, handle: Any) -> None:
        """Undo one ``lock`` of ``handle``."""

    @abstractmethod
    def evict(self, num_pages: int) -> IntArray:
        """Drop unlocked prefixes, leaves first, until at least ``num_pages`` pages are dropped or no unlocked prefix is
        left. Return the dropped pages ``[groups, n]``, which now belong to the caller. Called when too few pages are
        free.
        """

    @abstractmethod
    def reset(self) -> IntArray:
        """Drop every prefix that is not locked. Return its pages ``[groups, n]``, which now belong to the caller.
        Called when the operator flushes the cache."""

    def shared_prefixes(self, handles: Sequence[Any]) -> list[tuple[list[int], int]]:
        """Return groups of paths that begin with the same pages.

        ``handles`` has one entry per decode row; each path is locked once per entry. Each group is a list of two or
        more indices into ``handles``, and the number of tokens (a multiple of ``page_size``) that all rows of the group
        hold in the same pages. An index is in at most one group. The groups are those that save the most reads: they
        maximise the sum of (rows - 1) * tokens. The scheduler calls this when the decode rows or their pages change.
        Needs ``cache.shared_prefixes``.
        """
        return []

    @property
    @abstractmethod
    def evictable_pages(self) -> int:
        """Return the number of pages that ``evict`` could return now."""

    @property
    @abstractmethod
    def total_pages(self) -> int:
        """Return the number of pages that the cache owns, locked or not."""

    def check_integrity(self) -> None:
        """Assert the cache's own invariants. Called when the engine is idle and by tests. Takes time linear in the
        cache's size."""
