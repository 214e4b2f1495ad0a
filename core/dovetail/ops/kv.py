"""Writing keys and values to a paged pool."""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from dovetail.ops.cpu.kernels import kernels


@functools.cache
def _triton() -> ModuleType:
    from dovetail.ops.triton import kv

    return kv


def store(k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out_loc: torch.Tensor) -> None:
    """Write ``k, v [tokens, kv_heads, head_dim]``, contiguous but for the tokens, to places ``out_loc`` (int64
    ``[tokens]``) of contiguous ``keys, values [places, kv_heads, head_dim]`` of the same dtype."""
    compiled = kernels(k.dtype) if k.device.type == "cpu" else None
    if compiled is not None:
        compiled.store(k, v, keys, values, out_loc)
        return
    if k.is_cuda:
        _triton().store(k, v, keys, values, out_loc)
        return
    keys.index_copy_(0, out_loc, k)
    values.index_copy_(0, out_loc, v)
