"""Do all operations between the projection to queries, keys and values and attention in one pass. Each element of
``qkv`` is read once and written once, rotated (and normalised) in float32 and rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.interfaces.store import KVScales
from dovetail.ops.kv_dtypes import LEAST_SCALE, limit
from dovetail.ops.triton.kv import saturated
from dovetail.ops.triton.kv_scales import computed_scale
from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.sizes import cdiv, next_power_of_2

PAIRS = 1024
"""A program rotates this many pairs of elements: heads times half a head."""


@triton.jit
def _rotated(
    qkv, table, positions, q_weight, k_weight, eps, qkv_stride, token, head, at, inside,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Return both halves of heads, normalised and rotated, and both as they were."""
    half: tl.constexpr = SIZE // 2
    source = qkv + token * qkv_stride + head * SIZE + at
    present = (head < HEADS + 2 * KV_HEADS) & inside
    low = tl.load(source, present, 0.0).to(tl.float32)
    high = tl.load(source + half, present, 0.0).to(tl.float32)
    angles = table + tl.load(positions + token) * 2 * SIZE + at
    cos = tl.load(angles, inside, 0.0)
    sin = tl.load(angles + SIZE + half, inside, 0.0)
    normed_low, normed_high = low, high
    if NORM:
        mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / SIZE
        scale = tl.rsqrt(mean + eps)[:, None]
        is_query = head < HEADS
        q_low = tl.load(q_weight + at, inside, 0.0).to(tl.float32)
        q_high = tl.load(q_weight + half + at, inside, 0.0).to(tl.float32)
        k_low = tl.load(k_weight + at, inside, 0.0).to(tl.float32)
        k_high = tl.load(k_weight + half + at, inside, 0.0).to(tl.float32)
        normed_low = low * scale * tl.where(is_query, q_low, k_low)
        normed_high = high * scale * tl.where(is_query, q_high, k_high)
    turned_low = normed_low * cos - normed_high * sin
    turned_high = normed_high * cos + normed_low * sin
    return turned_low, turned_high, low, high


@triton.jit(do_not_specialize_on_alignment=["positions", "out_loc"])
def _rotate_and_store(
    qkv, q, keys, values, table, positions, out_loc, q_weight, k_weight, eps, qkv_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr,
    NORM: tl.constexpr, LIMIT: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    half: tl.constexpr = SIZE // 2
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    at = tl.arange(0, BLOCK_HALF)[None, :]
    inside = at < half
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    turned_low, turned_high, low, high = _rotated(
        qkv, table, positions, q_weight, k_weight, eps, qkv_stride, token, head, at, inside, HEADS, KV_HEADS, SIZE, NORM
    )
    present = (head < HEADS + 2 * KV_HEADS) & inside
    place = tl.load(out_loc + token)
    if tl.program_id(1) * BLOCK_HEADS < HEADS:
        target = q + (token * HEADS + head) * SIZE + at
        mine = (head < HEADS) & inside
        tl.store(target, turned_low.to(q.dtype.element_ty), mine)
        tl.store(target + half, turned_high.to(q.dtype.element_ty), mine)
    if (tl.program_id(1) + 1) * BLOCK_HEADS > HEADS:
        target = place * KV_HEADS * SIZE + (head - HEADS) * SIZE + at
        mine = (head >= HEADS) & (head < HEADS + KV_HEADS) & inside
        tl.store(keys + target, saturated(turned_low, LIMIT).to(keys.dtype.element_ty), mine)
        tl.store(keys + target + half, saturated(turned_high, LIMIT).to(keys.dtype.element_ty), mine)
        target = place * KV_HEADS * SIZE + (head - HEADS - KV_HEADS) * SIZE + at
        mine = (head >= HEADS + KV_HEADS) & present
        tl.store(values + target, saturated(low, LIMIT).to(values.dtype.element_ty), mine)
        tl.store(values + target + half, saturated(high, LIMIT).to(values.dtype.element_ty), mine)


@triton.jit
def _store_heads(
    low, high, memory, scales, place, head, at, mine,
    KV_HEADS: tl.constexpr, SIZE: tl.constexpr, COMPUTED: tl.constexpr, LIMIT: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Store halves of heads with their scales. ``head [heads, 1]`` counts the heads of the memory."""
    own = (head >= 0) & (head < KV_HEADS)
    if COMPUTED:
        largest = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
        scale = computed_scale(largest, LIMIT, LEAST)[:, None]
        tl.store(scales + place * KV_HEADS + head, scale, own)
    else:
        scale = tl.load(scales + head, own, 1.0)
    target = memory + (place * KV_HEADS + head) * SIZE + at
    kind = memory.dtype.element_ty
    tl.store(target, saturated(low / scale.to(tl.float32), LIMIT).to(kind), mine)
    tl.store(target + SIZE // 2, saturated(high / scale.to(tl.float32), LIMIT).to(kind), mine)


@triton.jit(do_not_specialize_on_alignment=["positions", "out_loc"])
def _rotate_and_store_scaled(
    qkv, q, keys, values, k_scales, v_scales, table, positions, out_loc, q_weight, k_weight, eps, qkv_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, NORM: tl.constexpr, COMPUTED: tl.constexpr,
    LIMIT: tl.constexpr, LEAST: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    at = tl.arange(0, BLOCK_HALF)[None, :]
    inside = at < SIZE // 2
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    turned_low, turned_high, low, high = _rotated(
        qkv, table, positions, q_weight, k_weight, eps, qkv_stride, token, head, at, inside, HEADS, KV_HEADS, SIZE, NORM
    )
    place = tl.load(out_loc + token)
    target = q + (token * HEADS + head) * SIZE + at
    mine = (head < HEADS) & inside
    tl.store(target, turned_low.to(q.dtype.element_ty), mine)
    tl.store(target + SIZE // 2, turned_high.to(q.dtype.element_ty), mine)
    own = head - HEADS
    mine = (own >= 0) & (own < KV_HEADS) & inside
    _store_heads(turned_low, turned_high, keys, k_scales, place, own, at, mine, KV_HEADS, SIZE, COMPUTED, LIMIT, LEAST)
    own -= KV_HEADS
    mine = (own >= 0) & (own < KV_HEADS) & inside
    _store_heads(low, high, values, v_scales, place, own, at, mine, KV_HEADS, SIZE, COMPUTED, LIMIT, LEAST)


def rotate_and_store(
    qkv: torch.Tensor,
    heads: int,
    kv_heads: int,
    table: torch.Tensor,
    positions: torch.Tensor,
    norm: tuple[torch.Tensor, torch.Tensor, float] | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    out_loc: torch.Tensor,
) -> torch.Tensor:
    """Compute ``ops.rotary.rotate_and_store``."""
    tokens, total, size = qkv.shape
    assert total == heads + 2 * kv_heads
    assert qkv.stride(2) == 1
    assert qkv.stride(1) == size
    assert keys.shape == values.shape
    assert keys.shape[-2:] == (kv_heads, size)
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert table.is_contiguous()
    q = torch.empty(tokens, heads, size, dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight, eps = norm or (None, None, 0.0)
    if tokens:
        block_half = next_power_of_2(size // 2)
        block_heads = max(1, PAIRS // block_half)
        launch(
            _rotate_and_store, (tokens, cdiv(total, block_heads)),
            qkv, q, keys, values, table, positions, out_loc, q_weight, k_weight, eps, qkv.stride(0),
            HEADS=heads, KV_HEADS=kv_heads, SIZE=size, NORM=norm is not None, LIMIT=limit(keys.dtype) or 0.0,
            BLOCK_HEADS=block_heads, BLOCK_HALF=block_half, num_warps=4,
        )  # fmt: skip
    return q


def rotate_and_store_scaled(
    qkv: torch.Tensor,
    heads: int,
    kv_heads: int,
    table: torch.Tensor,
    positions: torch.Tensor,
    norm: tuple[torch.Tensor, torch.Tensor, float] | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    scales: KVScales,
    out_loc: torch.Tensor,
) -> torch.Tensor:
    """Compute ``ops.rotary.rotate_and_store_scaled``."""
    tokens, total, size = qkv.shape
    assert total == heads + 2 * kv_heads
    assert qkv.stride(2) == 1
    assert qkv.stride(1) == size
    assert keys.shape == values.shape
    assert keys.shape[-2:] == (kv_heads, size)
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert table.is_contiguous()
    q = torch.empty(tokens, heads, size, dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight, eps = norm or (None, None, 0.0)
    if tokens:
        block_half = next_power_of_2(size // 2)
        block_heads = max(1, PAIRS // block_half)
        launch(
            _rotate_and_store_scaled, (tokens, cdiv(total, block_heads)),
            qkv, q, keys, values, *scales, table, positions, out_loc, q_weight, k_weight, eps, qkv.stride(0),
            HEADS=heads, KV_HEADS=kv_heads, SIZE=size, NORM=norm is not None, COMPUTED=scales.keys.stride(0) != 0,
            LIMIT=limit(keys.dtype), LEAST=LEAST_SCALE, BLOCK_HEADS=block_heads, BLOCK_HALF=block_half, num_warps=4,
        )  # fmt: skip
    return q
