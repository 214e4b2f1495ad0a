"""Hold the KV pools of layers that keep plain keys and values, and of layers that keep latents."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dovetail.errors import ConfigError
from dovetail.interfaces.cache import CacheGroup, CacheGroupKind, KVPool
from dovetail.interfaces.executor import ArenaLayout
from dovetail.memory.state_pool import StatePool
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


class PagedKVPool(KVPool):
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

    def _make_values(self) -> torch.Tensor:
        """Return the memory of the values, ``[layers, num_pages, page_size, kv_heads, size of a value]``."""
        return torch.empty_like(self.k)

    def _distinct(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return those of the two that together are the memory of the pool, each part of it once."""
        return keys, values

    def clear(self) -> None:
        """Fill all pages with zeros."""
        for places in self._raw:
            places.zero_()

    def keys(self, layer_id: int) -> torch.Tensor:
        """See ``KVPool.keys``."""
        return self._keys[layer_id]

    def values(self, layer_id: int) -> torch.Tensor:
        """See ``KVPool.values``."""
        return self._values[layer_id]

    def store(self, layer_id: int, k: torch.Tensor, v: torch.Tensor | None, out_loc: torch.Tensor) -> None:
        """See ``KVPool.store``. If several tokens name one location (padding rows on page 0), any one of them is
        kept."""
        assert v is not None, "only a latent group has no values of its own"
        store(k, v, self._k_rows[layer_id], self._v_rows[layer_id], out_loc)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """See ``KVPool.copy``."""
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
        """See ``KVPool.store``. ``v`` is ignored."""
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

    def _split(self, parts: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the keys and the values of each layer."""
        return parts[::2], parts[1::2]


class LatentArenaPool(ArenaKVPool, LatentKVPool):
    """Hold the vectors of a latent cache group in slabs, as ``ArenaKVPool`` does keys and values."""

    _parts_per_layer = 1

    def _split(self, parts: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return parts, [part[..., : self.group.value_dim] for part in parts]


def make_arena(
    groups: Sequence[CacheGroup],
    layout: ArenaLayout,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    state_dtype: torch.dtype | None = None,
) -> tuple[list[ArenaKVPool], list[StatePool]]:
    """Allocate one memory and return the pools of ``groups`` in it: those with pages, and those of states. ``dtype`` is that of
    keys and values, ``state_dtype`` that of the model (None: the same). Page 0 of each is initialised with zeros. On CUDA
    all pages are; see ``PagedKVPool``."""
    memory = torch.empty(layout.num_slabs * layout.slab_bytes, dtype=torch.uint8, device=device)
    (memory[: layout.slab_bytes] if memory.device.type == "cpu" else memory).zero_()
    pools: list[ArenaKVPool] = []
    states: list[StatePool] = []
    for index, group in enumerate(groups):
        if group.kind is CacheGroupKind.STATE:
            slots = memory.view(layout.num_slabs * layout.pages[index], -1)
            states.append(StatePool(group, slots, state_dtype or dtype))
        else:
            kind = LatentArenaPool if group.kind is CacheGroupKind.LATENT else ArenaKVPool
            pools.append(kind(group, index, layout, page_size, memory.view(dtype)))
    return pools, states
