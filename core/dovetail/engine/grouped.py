"""Treat the attention backends and the pools of several cache groups like those of one.

With one cache group, the engine plans, captures and stores with that group's backend and pool themselves. With several,
it has one ``GroupedAttention`` and one ``GroupedPools``, so that everything else is the same.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, TypeAlias

from dovetail.interfaces.attention import AttentionBackend

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from dovetail.interfaces.attention import AttentionLayer
    from dovetail.interfaces.mixer import MixerBackend
    from dovetail.interfaces.store import KVStore, StateStore
    from dovetail.types import Batch


class GroupedAttention(AttentionBackend):
    """Plan the attention backends of several cache groups together: ``members[g]`` plans ``batch.view(g)``. Layers call
    the members directly."""

    def __init__(self, members: Sequence[AttentionBackend]) -> None:
        """``members`` has the backend of each group with pages. All have the same class."""
        self.members = tuple(members)

    def plan(self, batch: Batch) -> None:
        """See ``AttentionBackend``."""
        for group, member in enumerate(self.members):
            member.plan(batch.view(group))

    def forward(self, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        """See ``AttentionBackend``. Layers call the backend of their own group instead."""
        raise NotImplementedError("a layer attends with the backend of its cache group")

    def shares(self, batch: Batch) -> bool:
        """Return what the backend of the first group returns. ``engine.sharing`` asks the others themselves."""
        return bool(self.members) and self.members[0].shares(batch)

    def variant(self, batch: Batch) -> int:
        """Return the variant that is best for the first group. All groups use it."""
        return self.members[0].variant(batch) if self.members else 0

    def has_variant(self, variant: int, rows: int) -> bool:
        """Return what the backend of the first group returns."""
        return bool(self.members) and self.members[0].has_variant(variant, rows)

    def plan_capture(self, batch: Batch) -> None:
        """See ``AttentionBackend``."""
        for group, member in enumerate(self.members):
            member.plan_capture(batch.view(group))

    def plan_replay(self, batch: Batch) -> None:
        """See ``AttentionBackend``."""
        for group, member in enumerate(self.members):
            member.plan_replay(batch.view(group))


class GroupedPools:
    """Hold the pools of several cache groups, which have the same device and the same tokens per page. A model without keys
    and values has no ``page_size``: 1."""

    def __init__(
        self, members: Sequence[KVStore], states: Sequence[StateStore] = (), mixer: MixerBackend | None = None
    ) -> None:
        """``members`` has the store of each group with pages, ``states`` that of each state group. ``mixer`` computes the
        operations of layers with a state."""
        self.members, self.states, self.mixer = tuple(members), tuple(states), mixer
        self.device = (*members, *states)[0].device
        self.page_size = members[0].page_size if members else 1


Pools: TypeAlias = "KVStore | GroupedPools"


def backends_of(backend: AttentionBackend) -> tuple[AttentionBackend, ...]:
    """Return the attention backend of each cache group with pages. They are the first entries of ``Batch.attn``; those of
    state groups follow (see ``engine.states``)."""
    return backend.members if isinstance(backend, GroupedAttention) else (backend,)


def pools_of(pool: Pools) -> tuple[KVStore, ...]:
    """Return the store of each cache group with pages: ``Batch.kv``."""
    return pool.members if isinstance(pool, GroupedPools) else (pool,)


def states_of(pool: Pools) -> tuple[StateStore, ...]:
    """Return the store of each state group."""
    return pool.states if isinstance(pool, GroupedPools) else ()


def mixer_of(pool: Pools) -> MixerBackend:
    """Return the backend of layers with a state. The model must have a state group."""
    assert isinstance(pool, GroupedPools)
    assert pool.mixer is not None, "a model with a state group has a backend of such layers"
    return pool.mixer


def grouped_attention(members: Sequence[AttentionBackend]) -> AttentionBackend:
    """Return what plans the backends of all cache groups: the backend itself if there is one."""
    return members[0] if len(members) == 1 else GroupedAttention(members)


def grouped_pools(
    members: Sequence[KVStore], states: Sequence[StateStore] = (), mixer: MixerBackend | None = None
) -> Pools:
    """Return the pools of all cache groups: the store itself if there is one, with pages."""
    return members[0] if len(members) == 1 and not states else GroupedPools(members, states, mixer)


def set_views(batch: Batch, others: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Set ``Batch.views`` from the ``page_table`` and ``out_loc`` of each cache group after the first. The other fields
    that an attention backend reads must be set already. The views share the arrays of ``batch``; each has its own ``shared``,
    of ``batch.shared.others``."""
    batch.views = ()
    shared = () if batch.shared is None else batch.shared.others
    views: list[Batch] = []
    for number, (page_table, out_loc) in enumerate(others):
        view = copy.copy(batch)
        view.page_table, view.out_loc, view.shared = page_table, out_loc, shared[number] if shared else None
        views.append(view)
    batch.views = tuple(views)
