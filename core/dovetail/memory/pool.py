"""Hold the KV pool of layers that keep plain keys and values."""

from __future__ import annotations

import torch

from dovetail.interfaces.cache import CacheGroup, KVPool
from dovetail.ops.kv import store
from dovetail.ops.kv_dtypes import raw

_NAMED = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def pool_dtype(name: str) -> torch.dtype:
    """Return the dtype of a value of ``memory.kv_dtype`` other than ``auto``."""
    return _NAMED.get(name) or getattr(torch, name)


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
        self.v = torch.empty(shape, dtype=dtype, device=device)
        fresh = slice(0, 1) if self.device.type == "cpu" else slice(None)
        self.k[:, fresh].zero_()
        self.v[:, fresh].zero_()
        k_places, v_places = self.k.flatten(1, 2), self.v.flatten(1, 2)  # [layers, places, kv_heads, head_dim]
        self._raw = raw(k_places), raw(v_places)  # the same memory
        self._keys = list(self.k.unbind(0))
        self._values = list(self.v.unbind(0))
        self._k_rows = list(k_places.unbind(0))
        self._v_rows = list(v_places.unbind(0))

    @staticmethod
    def bytes_per_page(group: CacheGroup, page_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of one page, keys and values of all layers together."""
        return 2 * group.num_layers * page_size * group.num_kv_heads * group.head_dim * dtype.itemsize

    def keys(self, layer_id: int) -> torch.Tensor:
        """See ``KVPool.keys``."""
        return self._keys[layer_id]

    def values(self, layer_id: int) -> torch.Tensor:
        """See ``KVPool.values``."""
        return self._values[layer_id]

    def store(self, layer_id: int, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor) -> None:
        """See ``KVPool.store``. If several tokens name one location (padding rows on page 0), any one of them is
        kept."""
        store(k, v, self._k_rows[layer_id], self._v_rows[layer_id], out_loc)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """See ``KVPool.copy``."""
        for places in self._raw:
            places.index_copy_(1, target, places.index_select(1, source))
