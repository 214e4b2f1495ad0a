"""Write keys and values to a paged pool, converted to its dtype."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.kv_dtypes import limit
from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.sizes import next_power_of_2


@triton.jit
def saturated(x, LIMIT: tl.constexpr):
    """Return ``x`` clamped to [-LIMIT, LIMIT], with NaN unchanged. If LIMIT is 0, return ``x``."""
    if LIMIT > 0:
        x = tl.where(x > LIMIT, LIMIT, tl.where(x < -LIMIT, -LIMIT, x))
    return x


@triton.jit
def _store(
    k, v, keys, values, out_loc, width, k_stride, v_stride, BLOCK: tl.constexpr, LIMIT: tl.constexpr, PDL: tl.constexpr
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.load(out_loc + token) * width + at
    row_k = tl.load(k + token * k_stride + at, inside, 0.0).to(tl.float32)
    row_v = tl.load(v + token * v_stride + at, inside, 0.0).to(tl.float32)
    tl.store(keys + place, saturated(row_k, LIMIT).to(keys.dtype.element_ty), inside)
    tl.store(values + place, saturated(row_v, LIMIT).to(values.dtype.element_ty), inside)


def store(k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out_loc: torch.Tensor) -> None:
    """Compute ``ops.kv.store``."""
    tokens, heads, size = k.shape
    assert k.stride(1) == v.stride(1) == size
    assert keys.is_contiguous()
    assert values.is_contiguous()
    if tokens:
        block = next_power_of_2(heads * size)
        launch(
            _store, (tokens,),
            k, v, keys, values, out_loc, heads * size, k.stride(0), v.stride(0),
            BLOCK=block, LIMIT=limit(keys.dtype) or 0.0, num_warps=min(8, max(1, block // 256)),
        )  # fmt: skip
