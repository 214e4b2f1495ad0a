"""Write keys and values to a paged pool."""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from dovetail.ops.cpu.kernels import kernels


@functools.cache
def _triton() -> ModuleType:
    from dovetail.ops.triton import kv

    return kv


def limit(dtype: torch.dtype) -> float | None:
    """Return the magnitude at which numbers saturate when they are written to a pool of ``dtype``, or None if they do
    not saturate."""
    return torch.finfo(dtype).max if dtype.itemsize == 1 else None


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``x`` as a pool of ``dtype`` stores it: rounded once; with 8 bits, numbers that are too large become the
    largest number."""
    largest = limit(dtype)
    return x.to(dtype) if largest is None else x.clamp(-largest, largest).to(dtype)


def raw(x: torch.Tensor) -> torch.Tensor:
    """Return the same memory in a dtype that torch can copy and fill on every device: 8-bit floats as bytes, other
    dtypes unchanged."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def store(k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out_loc: torch.Tensor) -> None:
    """Write ``k, v [tokens, kv_heads, head_dim]`` to locations ``out_loc`` (int64 ``[tokens]``) of contiguous ``keys,
    values [locations, kv_heads, head_dim]``, converted to their dtype as by ``narrowed``. ``k`` and ``v`` must be
    contiguous except in the token dimension.
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
