"""Write keys and values to a paged pool."""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from dovetail.ops.cpu.kernels import kernels
from dovetail.ops.kv_dtypes import narrowed, raw


@functools.cache
def _triton() -> ModuleType:
    from dovetail.ops.triton import kv

    return kv


def store(k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out_loc: torch.Tensor) -> None:
    """Write ``k, v [tokens, kv_heads, head_dim]`` to locations ``out_loc`` (int64 ``[tokens]``) of contiguous ``keys,
    values [locations, kv_heads, head_dim]``, converted to their dtype as by ``kv_dtypes.narrowed``. ``k`` and ``v``
    must be contiguous except in the token dimension.
    """
    if k.is_cuda:
        _triton().store(k, v, keys, values, out_loc)
        return
    if k.dtype is not keys.dtype:
        k, v = narrowed(k, keys.dtype), narrowed(v, values.dtype)
    compiled = kernels(k.dtype)
    if compiled is not None:
        compiled.store(k, v, keys, values, out_loc)
        return
    raw(keys).index_copy_(0, out_loc, raw(k))
    raw(values).index_copy_(0, out_loc, raw(v))
