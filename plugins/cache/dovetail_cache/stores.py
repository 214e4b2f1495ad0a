"""Make the stores of keys, values, latents and states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from pydantic import BaseModel

from dovetail.config.kv_scales import declares_kv_scales
from dovetail.interfaces.cache import CacheGroup, CacheGroupKind
from dovetail.interfaces.store import KVStore, KVStoreFactory, PageBytes, SlabMemory, StateStore, StoreContext
from dovetail.memory.pool import ArenaKVPool, LatentArenaPool, make_pool, plain_page_bytes
from dovetail.memory.scaled import (
    ScaledArenaKVPool,
    ScaledKVPool,
    ScaledLatentArenaPool,
    ScaledLatentPool,
    scaled_page_bytes,
)
from dovetail.memory.state_pool import StatePool, bytes_per_slot
from dovetail_cache.config import ScaledConfig


class _WithStates(KVStoreFactory):
    """Keep states as they are."""

    def __init__(self, config: BaseModel, context: StoreContext) -> None:
        self._context = context

    def slot_bytes(self, group: CacheGroup) -> int:
        """See ``KVStoreFactory.slot_bytes``."""
        return bytes_per_slot(group, self._context.state_dtype)

    def make_states(self, group: CacheGroup, memory: torch.Tensor) -> StateStore:
        """See ``KVStoreFactory.make_states``."""
        return StatePool(group, memory, self._context.state_dtype)


class PagedStores(_WithStates):
    """Keep keys and values, or latents, as they are, converted to the dtype of the memory."""

    def page_bytes(self, group: CacheGroup, page_size: int) -> PageBytes:
        """See ``KVStoreFactory.page_bytes``."""
        return plain_page_bytes(group, page_size, self._context.dtype)

    def make(self, group: CacheGroup, num_pages: int) -> KVStore:
        """See ``KVStoreFactory.make``."""
        own = self._context
        return make_pool(group, num_pages, own.page_size, own.dtype, own.device)

    def make_shared(self, group: CacheGroup, index: int, slabs: SlabMemory) -> KVStore:
        """See ``KVStoreFactory.make_shared``."""
        kind = LatentArenaPool if group.kind is CacheGroupKind.LATENT else ArenaKVPool
        return kind(group, index, slabs.layout, self._context.page_size, slabs.memory)


class ScaledStores(_WithStates):
    """Keep keys and values, or latents, in 8 bits with scales. Those of latents are always computed: no checkpoint has
    some."""

    def __init__(self, config: BaseModel, context: StoreContext) -> None:
        scales = cast("ScaledConfig", config).scales
        super().__init__(config, context)
        self._computed = not declares_kv_scales(context.checkpoint) if scales == "auto" else scales == "token_head"

    def page_bytes(self, group: CacheGroup, page_size: int) -> PageBytes:
        """See ``KVStoreFactory.page_bytes``."""
        return scaled_page_bytes(group, page_size, self._context.dtype, computed=self._computed)

    def make(self, group: CacheGroup, num_pages: int) -> KVStore:
        """See ``KVStoreFactory.make``."""
        own = self._context
        sizes = group, num_pages, own.page_size, own.dtype, own.device
        if group.kind is CacheGroupKind.LATENT:
            return ScaledLatentPool(*sizes)
        return ScaledKVPool(*sizes, computed=self._computed)

    def make_shared(self, group: CacheGroup, index: int, slabs: SlabMemory) -> KVStore:
        """See ``KVStoreFactory.make_shared``."""
        if group.kind is CacheGroupKind.LATENT:
            return ScaledLatentArenaPool(group, index, self._context.page_size, slabs)
        return ScaledArenaKVPool(group, index, self._context.page_size, slabs, computed=self._computed)

    @property
    def reads_scales(self) -> bool:
        """See ``KVStoreFactory.reads_scales``."""
        return not self._computed

    def describe(self) -> Mapping[str, str]:
        """See ``KVStoreFactory.describe``."""
        scales = "token and head, computed" if self._computed else "from the checkpoint; those of latents, computed"
        return {"scales": scales}
