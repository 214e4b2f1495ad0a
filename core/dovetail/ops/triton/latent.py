"""Do all operations between the projections of latent attention and the absorption of its queries in one pass: rotate
queries and the shared key, normalise the latent, and store both. All arithmetic is float32; the norm is rounded once, and
so are rotated elements."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.kv_dtypes import LEAST_SCALE, limit
from dovetail.ops.triton.kv import saturated
from dovetail.ops.triton.kv_scales import computed_scale
from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.sizes import cdiv, next_power_of_2

PAIRS = 512
"""A program rotates this many pairs of elements of queries: heads times half of the rotated elements."""


@triton.jit
def _rotated(source, table, position, at, inside, present, SIZE: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the two halves of rotated elements, of which ``source`` has the first. The table's row has cosines and
    signed sines of ``SIZE`` elements."""
    half: tl.constexpr = SIZE // 2
    if INTERLEAVED:
        low = tl.load(source + 2 * at, present, 0.0).to(tl.float32)
        high = tl.load(source + 2 * at + 1, present, 0.0).to(tl.float32)
    else:
        low = tl.load(source + at, present, 0.0).to(tl.float32)
        high = tl.load(source + half + at, present, 0.0).to(tl.float32)
    angles = table + position * 2 * SIZE + at
    cos = tl.load(angles, inside, 0.0)
    sin = tl.load(angles + SIZE + half, inside, 0.0)
    return low * cos - high * sin, high * cos + low * sin


@triton.jit(do_not_specialize_on_alignment=["positions", "out_loc"])
def _rotate_and_store_latents(
    q, out, latents, keys, scales, weight, table, positions, out_loc, eps, q_token, q_head, out_token, out_head, latent_token,
    HEADS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, INTERLEAVED: tl.constexpr, LIMIT: tl.constexpr,
    SCALED: tl.constexpr, LEAST: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_RANK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    half: tl.constexpr = SIZE // 2
    token = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    position = tl.load(positions + token)
    if tl.program_id(1) == 0:
        location = tl.load(out_loc + token)
        place = keys + location * (RANK + SIZE)
        column = tl.arange(0, BLOCK_RANK)
        real_column = column < RANK
        latent = tl.load(latents + token * latent_token + column, real_column, 0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps)
        normed = latent * scale * tl.load(weight + column, real_column, 0.0).to(tl.float32)
        normed = normed.to(latents.dtype.element_ty).to(tl.float32)
        pair = tl.arange(0, BLOCK_HALF)
        real = pair < half
        key = latents + token * latent_token + RANK
        key_low, key_high = _rotated(key, table, position, pair, real, real, SIZE, INTERLEAVED)
        if SCALED:
            largest = tl.maximum(tl.max(tl.abs(key_low), 0), tl.max(tl.abs(key_high), 0))
            largest = tl.maximum(largest, tl.max(tl.abs(normed), 0))
            own = computed_scale(largest, LIMIT, LEAST)
            tl.store(scales + location, own)
            own = own.to(tl.float32)
            normed, key_low, key_high = normed / own, key_low / own, key_high / own
        tl.store(place + column, saturated(normed, LIMIT).to(keys.dtype.element_ty), real_column)
        tl.store(place + RANK + pair, saturated(key_low, LIMIT).to(keys.dtype.element_ty), real)
        tl.store(place + RANK + half + pair, saturated(key_high, LIMIT).to(keys.dtype.element_ty), real)
    else:
        head = ((tl.program_id(1) - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
        at = tl.arange(0, BLOCK_HALF)[None, :]
        inside = at < half
        present = (head < HEADS) & inside
        source = q + token * q_token + head * q_head
        low, high = _rotated(source, table, position, at, inside, present, SIZE, INTERLEAVED)
        target = out + token * out_token + head * out_head + at
        tl.store(target, low.to(out.dtype.element_ty), present)
        tl.store(target + half, high.to(out.dtype.element_ty), present)


def rotate_and_store_latents(
    q: torch.Tensor,
    out: torch.Tensor,
    latents: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    table: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    out_loc: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    interleaved: bool,
) -> None:
    """Compute ``ops.latent.rotate_and_store_latents``."""
    tokens, heads, size = q.shape
    rank = latents.shape[1] - size
    assert out.shape == q.shape
    assert keys.shape[-1] == rank + size
    assert q.stride(2) == out.stride(2) == latents.stride(1) == 1
    assert keys.is_contiguous()
    assert scales is None or scales.is_contiguous()
    assert table.is_contiguous()
    assert table.shape[1:] == (2, size)
    if tokens:
        weight, eps = norm
        block_half = next_power_of_2(size // 2)
        block_heads = min(next_power_of_2(heads), max(1, PAIRS // block_half))
        launch(
            _rotate_and_store_latents, (tokens, 1 + cdiv(heads, block_heads)),
            q, out, latents, keys, keys if scales is None else scales, weight, table, positions, out_loc, eps,
            q.stride(0), q.stride(1), out.stride(0), out.stride(1), latents.stride(0),
            HEADS=heads, RANK=rank, SIZE=size, INTERLEAVED=interleaved, LIMIT=limit(keys.dtype) or 0.0,
            SCALED=scales is not None, LEAST=LEAST_SCALE, BLOCK_HEADS=block_heads, BLOCK_HALF=block_half, BLOCK_RANK=next_power_of_2(rank), num_warps=4,
        )  # fmt: skip
