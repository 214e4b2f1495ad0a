"""Write keys and values to a paged pool of 8 bits with scales. A stored number is x / scale, rounded once to the pool's
dtype; numbers that are too large become the largest number.

Scales are either fixed, one for each head, or computed: then each token and head has the scale with which its largest
number becomes the largest number of the dtype, rounded to bfloat16.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from dovetail.ops.kv_dtypes import LEAST_SCALE, KVScaleRows, narrowed, raw


@functools.cache
def _triton() -> ModuleType:
    from dovetail.ops.triton import kv_scales

    return kv_scales


def token_scales(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the computed scales of ``x [tokens, kv_heads, head_dim]``, bfloat16 ``[tokens, kv_heads]``."""
    largest = x.float().abs().amax(2)
    return (largest / torch.finfo(dtype).max).clamp_min(LEAST_SCALE).bfloat16()


def store_scaled(
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scales: KVScaleRows,
    out_loc: torch.Tensor,
) -> None:
    """Write ``k, v [tokens, kv_heads, head_dim]``, divided by their scales, to locations ``out_loc`` (int64 ``[tokens]``) of
    contiguous ``keys, values [locations, kv_heads, head_dim]``, and computed scales to ``scales``. ``k`` and ``v`` must be
    contiguous except in the token dimension."""
    if k.is_cuda:
        _triton().store_scaled(k, v, keys, values, scales, out_loc)
        return
    for x, memory, own in ((k, keys, scales.keys), (v, values, scales.values)):
        if scales.computed:
            scale = token_scales(x, memory.dtype)
            own.index_copy_(0, out_loc, scale)
        else:
            scale = own
        raw(memory).index_copy_(0, out_loc, raw(narrowed(x.float() / scale.float()[..., None], memory.dtype)))
