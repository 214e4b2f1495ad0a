"""Define prefix caches: a ``PrefixCache`` is an index from tokens to their pages and snapshots, whose memory is that of
``interfaces.store``. ``first_needed`` defines what must exist to resume a request."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import BaseModel

    from dovetail.interfaces.mixer_shapes import StateShape
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
    each. ``window`` is the number of tokens that a sliding layer sees; None for other kinds. Raises ``ValueError`` for
    values that contradict the kind.

    The layers of a latent group (MLA) store one vector of ``head_dim`` numbers for each token, the latent and a rotated
    key, which all query heads read: ``num_kv_heads`` is 1. The values are the first ``value_dim`` numbers of the vector,
    which are stored once. ``value_dim`` is None for other kinds. Every rank of tensor parallelism stores the whole
    vector.

    The layers of a state group keep states of a fixed size for each request, and no keys or values: each layer has the
    ``states``, of the whole model, and the numbers of heads are 0 (see ``of_states``). Other kinds have no ``states``.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    kind: CacheGroupKind = CacheGroupKind.FULL
    window: int | None = None
    value_dim: int | None = None
    states: tuple[StateShape, ...] = ()

    @classmethod
    def of_states(cls, num_layers: int, states: tuple[StateShape, ...]) -> CacheGroup:
        """Return the state group of ``num_layers`` layers that keep the states ``states`` each."""
        return cls(num_layers, 0, 0, CacheGroupKind.STATE, states=states)

    def share(self, ranks: int) -> CacheGroup:
        """Return the group that one of ``ranks`` ranks keeps. If there are fewer KV heads than ranks, several ranks keep the
        same one."""
        states = tuple(state.share(ranks) for state in self.states)
        return replace(self, num_kv_heads=-(-self.num_kv_heads // ranks), states=states)

    def with_state_dtype(self, dtype: str) -> CacheGroup:
        """Return the group with the states of recurrences, which are those in float32, in ``dtype``. States that are copies of
        inputs keep the dtype of the model."""
        states = tuple(state._replace(dtype=dtype) if state.dtype == "float32" else state for state in self.states)
        return replace(self, states=states)

    def __post_init__(self) -> None:
        sliding, window = self.kind is CacheGroupKind.SLIDING, self.window
        if sliding != (window is not None) or (window is not None and window < 1):
            raise ValueError(
                f"a cache group of kind {self.kind} has window {window}; allowed: with kind sliding a window of 1 or "
                "more, otherwise None"
            )
        latent = self.kind is CacheGroupKind.LATENT
        if latent != (self.value_dim is not None) or (latent and not 0 < (self.value_dim or 0) <= self.head_dim):
            raise ValueError(
                f"a cache group of kind {self.kind} has head_dim {self.head_dim} and value_dim {self.value_dim}; allowed: with kind "
                "latent a value_dim from 1 to head_dim, otherwise None"
            )
        if (self.kind is CacheGroupKind.STATE) != bool(self.states) or (
            self.states and (self.num_kv_heads or self.head_dim)
        ):
            raise ValueError(
                f"a cache group of kind {self.kind} has num_kv_heads {self.num_kv_heads}, head_dim {self.head_dim} and "
                f"{len(self.states)} states in each layer; allowed: with kind state one or more states and 0 for both "
                "numbers (CacheGroup.of_states), otherwise no states"
            )


@dataclass(frozen=True, slots=True)
class GroupDescriptor:
    """Describe a cache group to a prefix cache. ``window`` is set for sliding groups only. ``num_bytes`` are the bytes
    of a page, or of a snapshot for a state group; only the ratios between groups matter."""

    kind: CacheGroupKind = CacheGroupKind.FULL
    window: int | None = None
    num_bytes: int = 1

    @property
    def paged(self) -> bool:
        """Return True if the group keeps pages, and False if it keeps snapshots."""
        return self.kind is not CacheGroupKind.STATE

    @property
    def dense(self) -> bool:
        """Return True if every page of a prefix is needed to resume after it, as full and latent groups do."""
        return self.kind in (CacheGroupKind.FULL, CacheGroupKind.LATENT)


def first_needed(group: GroupDescriptor, length: int, page_size: int) -> int:
    """Return the first column that must exist to resume at ``length``, a multiple of ``page_size``. All columns from it
    to ``length // page_size`` must exist.

    Full and latent groups need all of ``[0, length)``. A sliding group needs the pages that contain one of the tokens
    ``length - window + 1`` to ``length - 1``, which the next token sees. A state group needs no page: it needs a
    snapshot at exactly ``length``.
    """
    if group.dense:
        return 0
    if group.window is None:
        return length // page_size
    return min(max(0, length - group.window + 1), length) // page_size


class Match(NamedTuple):
    """Describe a cached prefix of a key.

    ``length`` is the number of tokens in the prefix, ``n * page_size``. ``pages`` (int32 ``[paged groups, n]``) holds
    their pages; 0 is a hole, a page that does not exist. ``states`` (int32 ``[state groups]``, or None without such
    groups) holds the snapshots at exactly ``length``, 0 where there is none. The cache owns these pages and snapshots; those that are needed to resume
    at ``length`` may be read while ``handle`` is locked. ``handle`` is opaque to callers, who pass it to ``lock``,
    ``unlock`` and ``shared_prefixes``.

    ``reached`` has for each group the largest length that this group alone accepts for the key. The group with the
    smallest value limited the match. ``common`` is the number of tokens, in whole pages, on which the key agrees with
    what the cache knows, whether or not it can resume there. Requests branch there: a snapshot at ``common`` serves
    the next one.
    """

    length: int
    pages: IntArray
    handle: Any
    states: IntArray | None = None
    reached: tuple[int, ...] = ()
    common: int = 0


@dataclass(frozen=True, slots=True)
class CacheContext:
    """Describe what a prefix cache is built for: the tokens per page, which are the same in all groups, and the cache
    groups. One full group is the default."""

    page_size: int
    groups: tuple[GroupDescriptor, ...] = (GroupDescriptor(),)

    @property
    def num_paged(self) -> int:
        """Return the number of groups with pages, which is the number of rows of ``Match.pages``."""
        return sum(group.paged for group in self.groups)


class CachedPrefixes(ABC):
    """Show what a prefix cache holds, without a way to change it. Schedule policies get this. With data-parallel attention
    it shows the caches of all ranks together: a match is then the longest one, and its pages belong to one rank."""

    @abstractmethod
    def match(self, tokens: IntArray, namespace: str = "") -> Match:
        """Return the longest cached prefix of ``tokens`` at which every group can resume. In its ``pages``, the columns
        before ``first_needed`` of a group are holes. Updates the recency of what was found; locks nothing.

        The scheduler calls this for waiting requests; prefix-aware policies call it too.
        """

    @property
    @abstractmethod
    def evictable(self) -> tuple[int, ...]:
        """Return for each group the number of pages or snapshots that ``evict`` could return now."""

    @property
    @abstractmethod
    def total(self) -> tuple[int, ...]:
        """Return for each group the number of pages or snapshots that the cache owns, locked or not."""


class PrefixCache(CachedPrefixes):
    """Map (namespace, tokens) to pages and snapshots. Uses the CPU only. Not thread-safe: the scheduler's thread makes
    all calls.

    Pages and snapshots change owners and are never copied: ``insert`` gives them to the cache; ``evict`` and ``reset``
    give them back to the caller, who returns them to the allocator. A column holds the pages of ``page_size`` tokens,
    one for each paged group. Page 0 is a hole: no page. What must exist to resume at a length is defined by
    ``first_needed``. Keys are int32 arrays and are compared in full. Only full pages are kept: the tail of a key beyond
    a multiple of ``page_size`` stays with the caller.

    Only full and latent groups are required of every cache. A cache that keeps sliding and state groups offers
    ``cache.groups``; models with such groups need it.
    """

    def __init__(self, config: BaseModel, context: CacheContext) -> None:
        """Store what the cache needs of ``config``, which is this cache's own config section, and of ``context``."""

    @abstractmethod
    def insert(
        self,
        tokens: IntArray,
        pages: IntArray,
        namespace: str = "",
        priority: int = 0,
        states: IntArray | None = None,
    ) -> Match:
        """Offer ``pages [paged groups, len(tokens) // page_size]`` for ``tokens``, and return the path that now holds
        them.

        An offered page belongs to the cache from now on where ``result.pages`` has the same number; every other offered
        page still belongs to the caller. Where ``result.pages`` has another page, the cache already had it for these
        tokens, and the caller frees its own once its rows read the cached page instead. Where the cache has a hole and
        the caller offers a page, the cache takes the page. An offered hole changes nothing. Full and latent groups are
        offered without holes. A cache may keep fewer columns than the caller offers. Columns from
        ``result.pages.shape[1]`` on still belong to the caller.

        ``states [state groups]`` offers snapshots at exactly the end of the last column; 0 offers none. A snapshot was
        taken where ``result.states`` has the same number; otherwise it still belongs to the caller.

        Copies what it keeps of ``tokens``, ``pages`` and ``states``. Locks nothing. ``priority`` is the request's
        priority. The scheduler calls this when a part of a request's prompt has entered the pool, and when the request
        ends or is retracted.
        """

    @abstractmethod
    def lock(self, handle: Any) -> None:
        """Protect what is needed to resume at the length of ``handle`` from eviction: the whole path of full and latent
        groups, the pages from ``first_needed`` on of sliding groups, and the snapshots. What is inserted later at these
        places is protected too. Locks are counted: each call needs its own ``unlock``.

        A request locks its path from admission until it leaves the table; groups and sessions lock theirs while they
        are pinned. No ``evict`` or ``reset`` may come between the ``match`` or ``insert`` that returned an unlocked
        handle and its first ``lock``.
        """

    @abstractmethod
    def unlock(self, handle: Any) -> None:
        """Undo one ``lock`` of ``handle``."""

    @abstractmethod
    def evict(self, short: Sequence[int]) -> list[IntArray]:
        """Drop what is not locked until, in each group, at least ``short[group]`` pages (snapshots of a state group) are
        dropped or none is left that can be dropped. Return the dropped pages or snapshots of each group, int32 ``[n]``
        each; they now belong to the caller. More may be dropped than was needed. Full and latent groups lose the ends
        of prefixes first, so that no page is left without those before it. Called when too few pages are free.
        """

    def evict_unneeded(self, most: Sequence[int]) -> list[IntArray]:
        """Drop unlocked pages or snapshots that no likely match needs, about ``most[group]`` of each group, and return them as
        ``evict`` does; they are worth less than anything that ``evict`` would drop of other groups. An empty list means that
        there is nothing of the kind. Called before ``evict`` where cache groups share one memory."""
        return []

    @abstractmethod
    def reset(self) -> list[IntArray]:
        """Drop everything that is not locked. Return the pages or snapshots of each group, as ``evict`` does. Called
        when the operator flushes the cache."""

    def shared_prefixes(self, handles: Sequence[Any]) -> list[tuple[list[int], int]]:
        """Return groups of paths that begin with the same pages.

        ``handles`` has one entry per decode row; each path is locked once per entry. Each group is a list of two or
        more indices into ``handles``, and the number of tokens (a multiple of ``page_size``) with which all paths of the
        group begin. All rows hold these tokens in the same pages of every full and latent cache group, and in the same
        pages of every sliding one as far as they need them (``first_needed``). An index is in
        at most one group. The groups are those that save the most reads where all tokens are read: they maximise the sum of (rows - 1) * tokens.
        The scheduler calls this when the decode rows or their pages change. Needs ``cache.shared_prefixes``. Returns no
        groups if no cache group has pages.
        """
        return []

    def check_integrity(self) -> None:
        """Assert the cache's own invariants. Called when the engine is idle and by tests. Takes time linear in the
        cache's size."""
