"""Write keys and values to a paged pool of 8 bits with scales."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.kv_dtypes import LEAST_SCALE, KVScaleRows, limit
from dovetail.ops.triton.kv import saturated
from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.sizes import cdiv, next_power_of_2


@triton.jit
def computed_scale(largest, LIMIT: tl.constexpr, LEAST: tl.constexpr):
    """Return the scale with which ``largest`` becomes LIMIT, as it is stored."""
    return tl.maximum(largest / LIMIT, LEAST).to(tl.bfloat16)


@triton.jit
def _store_rows(
    x, memory, scales, token, token_stride, place, head, at, inside,
    KV_HEADS: tl.constexpr, SIZE: tl.constexpr, COMPUTED: tl.constexpr, LIMIT: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    row = tl.load(x + token * token_stride + head[:, None] * SIZE + at[None, :], inside, 0.0).to(tl.float32)
    if COMPUTED:
        scale = computed_scale(tl.max(tl.abs(row), 1), LIMIT, LEAST)
        tl.store(scales + place * KV_HEADS + head, scale, head < KV_HEADS)
    else:
        scale = tl.load(scales + head, head < KV_HEADS, 1.0)
    stored = saturated(row / scale.to(tl.float32)[:, None], LIMIT).to(memory.dtype.element_ty)
    tl.store(memory + (place * KV_HEADS + head[:, None]) * SIZE + at[None, :], stored, inside)


@triton.jit
def _store_scaled(
    k, v, keys, values, k_scales, v_scales, out_loc, k_stride, v_stride,
    KV_HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
    COMPUTED: tl.constexpr, LIMIT: tl.constexpr, LEAST: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, at = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK)
    inside = (head < KV_HEADS)[:, None] & (at < SIZE)[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.load(out_loc + token)
    _store_rows(k, keys, k_scales, token, k_stride, place, head, at, inside, KV_HEADS, SIZE, COMPUTED, LIMIT, LEAST)
    _store_rows(v, values, v_scales, token, v_stride, place, head, at, inside, KV_HEADS, SIZE, COMPUTED, LIMIT, LEAST)


def store_scaled(
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scales: KVScaleRows,
    out_loc: torch.Tensor,
) -> None:
    """Compute ``ops.kv_scales.store_scaled``."""
    tokens, heads, size = k.shape
    assert k.stride(1) == v.stride(1) == size
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert all(own.is_contiguous() for own in scales)
    if tokens:
        block = next_power_of_2(size)
        block_heads = min(next_power_of_2(heads), max(1, 2048 // block))
        launch(
            _store_scaled, (tokens, cdiv(heads, block_heads)),
            k, v, keys, values, *scales, out_loc, k.stride(0), v.stride(0),
            KV_HEADS=heads, SIZE=size, BLOCK_HEADS=block_heads, BLOCK=block, COMPUTED=scales.computed,
            LIMIT=limit(keys.dtype), LEAST=LEAST_SCALE, num_warps=4,
        )  # fmt: skip
