"""Hold the KV pools of layers that keep plain keys and values, and of layers that keep latents."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dovetail.errors import ConfigError
from dovetail.interfaces.cache import CacheGroup, CacheGroupKind
from dovetail.interfaces.executor import ArenaLayout
from dovetail.interfaces.store import (
    KVScales,
    KVStore,
    KVStoreFactory,
    KVTensors,
    PageBytes,
    PageLayout,
    SlabMemory,
    StateStore,
)
from dovetail.memory.page_format import export_parts, import_parts, layout_of
from dovetail.ops.kv import store
from dovetail.ops.kv_dtypes import raw

_NAMED = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def pool_dtype(name: str) -> torch.dtype:
    """Return the dtype of a value of ``memory.kv_dtype`` other than ``auto``."""
    return _NAMED.get(name) or getattr(torch, name)


def bytes_per_page(group: CacheGroup, page_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one page in the pool of ``make_pool``, keys and values of all layers together. A group of states
    has no pages: 0."""
    width = group.head_dim if group.kind is CacheGroupKind.LATENT else 2 * group.head_dim
    return group.num_layers * page_size * group.num_kv_heads * width * dtype.itemsize


def plain_page_bytes(group: CacheGroup, page_size: int, dtype: torch.dtype) -> PageBytes:
    """Return the bytes of one page in the pool of ``make_pool``, and of the block of one layer's keys, or values."""
    block = page_size * group.num_kv_heads * group.head_dim * dtype.itemsize
    return PageBytes(bytes_per_page(group, page_size, dtype), block)


def make_pool(
    group: CacheGroup, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device | str
) -> PagedKVPool:
    """Return a new pool for the layers of ``group``. Raises ``ConfigError`` for a group of states, which have no pages."""
    if group.kind is CacheGroupKind.STATE:
        raise ConfigError(
            "the model has layers that keep a state for each request (a cache group of kind state); this engine runs models "
            "whose layers keep keys and values or latents"
        )
    kind = LatentKVPool if group.kind is CacheGroupKind.LATENT else PagedKVPool
    return kind(group, num_pages, page_size, dtype, device)


class PagedKVPool(KVStore):
    """Hold the keys and values of one cache group in one tensor each: ``[layers, num_pages, page_size, kv_heads,
    head_dim]``.

    Page 0 belongs to no request and is initialised with zeros. On a CPU the other pages are not initialised, so that
    memory is touched only when it is used: they may hold anything until they are written. On CUDA all pages are
    initialised with zeros. Some kernels fetch whole pages (FlashAttention-3, if pages have a multiple of 128 tokens)
    and multiply the entries after a row's last token by 0. NaN would survive that.
    """

    def __init__(
        self, group: CacheGroup, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.group = group
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.device = torch.device(device)
        shape = (group.num_layers, num_pages, page_size, group.num_kv_heads, group.head_dim)
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = self._make_values()
        fresh = slice(0, 1) if self.device.type == "cpu" else slice(None)
        self.k[:, fresh].zero_()
        self.v[:, fresh].zero_()
        k_places, v_places = self.k.flatten(1, 2), self.v.flatten(1, 2)  # [layers, places, kv_heads, head_dim]
        self._raw = self._distinct(raw(k_places), raw(v_places))  # the same memory
        self._keys = list(self.k.unbind(0))
        self._values = list(self.v.unbind(0))
        self._k_rows = list(k_places.unbind(0))
        self._v_rows = list(v_places.unbind(0))
        self._finish()

    def _finish(self) -> None:
        """Collect the tensors of each layer for ``tensors``, and the parts of a page."""
        scales = self._scales()
        self._tensors = [KVTensors(*own) for own in zip(self._keys, self._values, scales, strict=True)]
        own = ((k,) if self.group.value_dim else (k, v) for k, v in zip(self._keys, self._values, strict=True))
        self._parts = [part for parts in own for part in parts]

    def _scales(self) -> Sequence[KVScales | None]:
        """Return the scales of each layer."""
        return [None] * self.group.num_layers

    def _make_values(self) -> torch.Tensor:
        """Return the memory of the values, ``[layers, num_pages, page_size, kv_heads, size of a value]``."""
        return torch.empty_like(self.k)

    def _distinct(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return those of the two that together are the memory of the pool, each part of it once."""
        return keys, values

    def clear(self) -> None:
        """See ``KVStore.clear``."""
        for places in self._raw:
            places.zero_()

    def poison(self, pages: Sequence[int] | None = None) -> None:
        """See ``KVStore.poison``."""
        for part in self._parts:
            own = raw(part)
            value = 0xFF if part.dtype.itemsize == 1 else math.nan  # all bits of an 8-bit float are NaN
            if pages is None:
                own.fill_(value)
            else:
                own[list(pages)] = value

    @property
    def layout(self) -> PageLayout:
        """See ``KVStore.layout``."""
        return layout_of("paged", 1, self._parts)

    def export_pages(self, pages: Sequence[int]) -> bytes:
        """See ``KVStore.export_pages``."""
        return export_parts(self.layout, self._parts, pages)

    def import_pages(self, data: bytes, pages: Sequence[int]) -> None:
        """See ``KVStore.import_pages``."""
        import_parts(self.layout, self._parts, data, pages)

    def keys(self, layer_id: int) -> torch.Tensor:
        """See ``KVStore.keys``."""
        return self._keys[layer_id]

    def values(self, layer_id: int) -> torch.Tensor:
        """See ``KVStore.values``."""
        return self._values[layer_id]

    def tensors(self, layer_id: int) -> KVTensors:
        """See ``KVStore.tensors``."""
        return self._tensors[layer_id]

    def store(self, layer_id: int, k: torch.Tensor, v: torch.Tensor | None, out_loc: torch.Tensor) -> None:
        """See ``KVStore.store``. If several tokens name one location (padding rows on page 0), any one of them is
        kept."""
        assert v is not None, "only a latent group has no values of its own"
        store(k, v, self._k_rows[layer_id], self._v_rows[layer_id], out_loc)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """See ``KVStore.copy``."""
        for places in self._raw:
            places.index_copy_(1, target, places.index_select(1, source))


class LatentKVPool(PagedKVPool):
    """Hold the vectors of a latent cache group in one tensor, ``[layers, num_pages, page_size, 1, head_dim]``. Values are
    a view of their first ``value_dim`` numbers. For initialisation see ``PagedKVPool``."""

    def _make_values(self) -> torch.Tensor:
        return self.k[..., : self.group.value_dim]

    def _distinct(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (keys,)

    def store(self, layer_id: int, k: torch.Tensor, v: torch.Tensor | None, out_loc: torch.Tensor) -> None:
        """See ``KVStore.store``. ``v`` is ignored."""
        rows = self._k_rows[layer_id]
        store(k, k, rows, rows, out_loc)


class ArenaKVPool(PagedKVPool):
    """Hold the keys and values of one cache group in slabs of a memory that other groups use too (see
    ``memory.arena``). Keys and values of a layer are views of the memory from the layer's first block on."""

    _parts_per_layer = 2

    def __init__(
        self, group: CacheGroup, index: int, layout: ArenaLayout, page_size: int, memory: torch.Tensor
    ) -> None:
        """``memory`` is one-dimensional and has the dtype of keys and values. ``index`` is the number of ``group`` in
        ``layout``."""
        self.group, self.page_size, self.dtype, self.device = group, page_size, memory.dtype, memory.device
        shape = (page_size, group.num_kv_heads, group.head_dim)
        block, pages = math.prod(shape), layout.pages[index]
        parts = group.num_layers * self._parts_per_layer
        self.num_pages = layout.num_slabs * layout.blocks[index] - (parts - 1) * pages
        size = self.num_pages * block
        found = [memory[at * pages * block :][:size].view(self.num_pages, *shape) for at in range(parts)]
        places = [part.flatten(0, 1) for part in found]
        self._keys, self._values = self._split(found)
        self._k_rows, self._v_rows = self._split(places)
        self._raw = tuple(raw(part)[None] for part in places)
        self._finish()

    def _split(self, parts: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the keys and the values of each layer."""
        return parts[::2], parts[1::2]


class LatentArenaPool(ArenaKVPool, LatentKVPool):
    """Hold the vectors of a latent cache group in slabs, as ``ArenaKVPool`` does keys and values."""

    _parts_per_layer = 1

    def _split(self, parts: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return parts, [part[..., : self.group.value_dim] for part in parts]


class ArenaMemory(SlabMemory):
    """Hold the memory of ``memory.arena``, ``bytes``. Slab 0 is initialised with zeros; on CUDA all slabs are, see
    ``PagedKVPool``."""

    def __init__(self, layout: ArenaLayout, dtype: torch.dtype, device: torch.device | str) -> None:
        """Allocate the memory. ``dtype`` is that of keys and values."""
        self.layout, self._dtype = layout, dtype
        self.bytes = self._allocate(layout.slab_bytes, device)
        self._beside: dict[int, torch.Tensor] = {}

    def _allocate(self, slab: int, device: torch.device | str) -> torch.Tensor:
        memory = torch.empty(self.layout.num_slabs * slab, dtype=torch.uint8, device=device)
        (memory[:slab] if memory.device.type == "cpu" else memory).zero_()
        return memory

    @property
    def memory(self) -> torch.Tensor:
        """See ``SlabMemory.memory``."""
        return self.bytes.view(self._dtype)

    def beside(self, slab_bytes: int) -> torch.Tensor:
        """See ``SlabMemory.beside``."""
        if slab_bytes not in self._beside:
            self._beside[slab_bytes] = self._allocate(slab_bytes, self.bytes.device)
        return self._beside[slab_bytes]


def make_states(group: CacheGroup, num_slots: int, stores: KVStoreFactory, device: torch.device | str) -> StateStore:
    """Return the store of a state group with memory of its own, ``num_slots`` slots. All states are 0 at first."""
    memory = torch.zeros(num_slots, stores.slot_bytes(group), dtype=torch.uint8, device=device)
    return stores.make_states(group, memory)


def make_arena(
    groups: Sequence[CacheGroup],
    layout: ArenaLayout,
    stores: KVStoreFactory,
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[list[KVStore], list[StateStore]]:
    """Allocate one memory and return the stores of ``groups`` in it: those with pages, and those of states. ``dtype`` is
    that of keys and values."""
    slabs = ArenaMemory(layout, dtype, device)
    pools: list[KVStore] = []
    states: list[StateStore] = []
    for index, group in enumerate(groups):
        if group.kind is CacheGroupKind.STATE:
            slots = slabs.bytes.view(layout.num_slabs * layout.pages[index], -1)
            states.append(stores.make_states(group, slots))
        else:
            pools.append(stores.make_shared(group, index, slabs))
    return pools, states
