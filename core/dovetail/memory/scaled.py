"""Hold keys and values, or latents, in 8 bits with scales, in a memory of their own or in slabs that several groups share.

With computed scales, each key and each value of a token and a head has a scale of 16 bits, which is kept beside the page. With
fixed scales, each head has one for its keys and one for its values. Latents have computed scales, one for each token.

In slabs, scales have a memory beside the slabs' own, in which they are found like blocks: the scales of block b are block b
of that memory. All groups with the same ``head_dim`` have equally many bytes of scales in a slab, and share them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from dovetail.errors import ConfigError
from dovetail.interfaces.cache import CacheGroup, CacheGroupKind
from dovetail.interfaces.store import KVScales, PageBytes, PageLayout, SlabMemory
from dovetail.memory.page_format import layout_of
from dovetail.memory.pool import ArenaKVPool, LatentArenaPool, LatentKVPool, PagedKVPool, plain_page_bytes
from dovetail.ops.kv_dtypes import KVScaleRows
from dovetail.ops.kv_scales import store_scaled

COMPUTED = torch.bfloat16
"""The dtype of computed scales."""


def scaled_page_bytes(group: CacheGroup, page_size: int, dtype: torch.dtype, *, computed: bool) -> PageBytes:
    """Return the bytes of one page with its scales."""
    plain = plain_page_bytes(group, page_size, dtype)
    latent = group.kind is CacheGroupKind.LATENT
    computed, parts = computed or latent, 1 if latent else 2
    beside = parts * group.num_layers * page_size * group.num_kv_heads * COMPUTED.itemsize if computed else 0
    return PageBytes(plain.page + beside, plain.block, beside)


class ScaledKVPool(PagedKVPool):
    """Hold keys and values with scales, which are ``computed`` or fixed. Fixed scales are 1 until ``load_scales``."""

    _parts_per_layer = 2

    def __init__(
        self,
        group: CacheGroup,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        computed: bool,
    ) -> None:
        self._computed = computed
        super().__init__(group, num_pages, page_size, dtype, device)

    def _scales(self) -> Sequence[KVScales | None]:
        self._scale_parts = self._allocate_scales() if self._computed else []
        if self._computed:
            rows = [part.flatten(0, 1) for part in self._scale_parts]
            self._raw += tuple(part[None] for part in rows)
            self._scale_rows = [KVScaleRows(*pair) for pair in self._of_layers(rows)]
            return [KVScales(*pair) for pair in self._of_layers(self._scale_parts)]
        heads = self.group.num_kv_heads
        fixed = torch.ones(self.group.num_layers, 2, heads, device=self.device)
        self._fixed = fixed
        self._scale_rows = [KVScaleRows(*own.unbind(0)) for own in fixed.unbind(0)]
        shape = self.num_pages, self.page_size, heads
        return [KVScales(k.expand(shape), v.expand(shape)) for k, v in self._scale_rows]

    def _of_layers(self, parts: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the parts of ``_allocate_scales`` for the keys and for the values of each layer."""
        count = self._parts_per_layer
        return list(zip(parts[::count], parts[count - 1 :: count], strict=True))

    def _allocate_scales(self) -> list[torch.Tensor]:
        """Return the scales of the keys and of the values of each layer, in turn, or those of latents: ``[num_pages,
        page_size, kv_heads]``."""
        group = self.group
        shape = (self._parts_per_layer * group.num_layers, self.num_pages, self.page_size, group.num_kv_heads)
        scales = torch.empty(shape, dtype=COMPUTED, device=self.device)
        (scales[:, :1] if self.device.type == "cpu" else scales).zero_()
        return list(scales.unbind(0))

    def _finish(self) -> None:
        super()._finish()
        self._parts += self._scale_parts

    def store(self, layer_id: int, k: torch.Tensor, v: torch.Tensor | None, out_loc: torch.Tensor) -> None:
        """See ``KVStore.store``."""
        assert v is not None, "only a latent group has no values of its own"
        rows = self._k_rows[layer_id], self._v_rows[layer_id]
        store_scaled(k, v, *rows, self._scale_rows[layer_id], out_loc)

    def load_scales(self, layer_id: int, k_scale: torch.Tensor, v_scale: torch.Tensor) -> None:
        """See ``KVStore.load_scales``. Raises ``ConfigError`` for scales that are not positive numbers."""
        for name, own, scale in zip(
            ("k_scale", "v_scale"), self._scale_rows[layer_id], (k_scale, v_scale), strict=True
        ):
            given = scale.float().flatten()
            if len(given) not in (1, self.group.num_kv_heads) or not (given.isfinite() & (given > 0)).all():
                raise ConfigError(
                    f"the checkpoint's {name} of layer {layer_id} is {given.tolist()!s:.80}; allowed: one positive number, or one for "
                    f"each of the {self.group.num_kv_heads} heads of keys and values"
                )
            own.copy_(given.expand(self.group.num_kv_heads))

    @property
    def layout(self) -> PageLayout:
        """See ``KVStore.layout``."""
        scales = 0 if self._computed else zlib.crc32(self._fixed.cpu().numpy().tobytes())
        return layout_of("scaled", 1, self._parts, scales)


class ScaledArenaKVPool(ScaledKVPool, ArenaKVPool):
    """Hold keys and values with scales in slabs that other groups use too."""

    def __init__(self, group: CacheGroup, index: int, page_size: int, slabs: SlabMemory, *, computed: bool) -> None:
        """``index`` is the number of ``group`` in the layout of ``slabs``."""
        self._computed, self._slabs, self._index = computed, slabs, index
        ArenaKVPool.__init__(self, group, index, slabs.layout, page_size, slabs.memory)

    def _allocate_scales(self) -> list[torch.Tensor]:
        layout, index, shape = self._slabs.layout, self._index, (self.page_size, self.group.num_kv_heads)
        block = shape[0] * shape[1]
        scales = self._slabs.beside(layout.blocks[index] * block * COMPUTED.itemsize).view(COMPUTED)
        size, step = self.num_pages * block, layout.pages[index] * block
        return [
            scales[at * step :][:size].view(self.num_pages, *shape)
            for at in range(self._parts_per_layer * self.group.num_layers)
        ]


class _LatentScales(ScaledKVPool):
    """Keep one scale for each latent, which is that of its key and of its value."""

    _parts_per_layer = 1

    def store(self, layer_id: int, k: torch.Tensor, v: torch.Tensor | None, out_loc: torch.Tensor) -> None:
        """See ``KVStore.store``. ``v`` is ignored."""
        rows = self._k_rows[layer_id]
        store_scaled(k, k, rows, rows, self._scale_rows[layer_id], out_loc)


class ScaledLatentPool(_LatentScales, LatentKVPool):
    """Hold latents with computed scales."""

    def __init__(
        self, group: CacheGroup, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__(group, num_pages, page_size, dtype, device, computed=True)


class ScaledLatentArenaPool(_LatentScales, ScaledArenaKVPool, LatentArenaPool):
    """Hold latents with computed scales in slabs that other groups use too."""

    def __init__(self, group: CacheGroup, index: int, page_size: int, slabs: SlabMemory) -> None:
        """For ``index`` see ``ScaledArenaKVPool``."""
        ScaledArenaKVPool.__init__(self, group, index, page_size, slabs, computed=True)
