"""Compute the gated delta rule for decode rows. A program computes tiles of value channels one after the other, all with the
same key head, and loads the next one meanwhile."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.ssd import ROWS, softplus

if TYPE_CHECKING:
    from dovetail.interfaces.mixer_shapes import DeltaGates, DeltaShape


MANY_ROWS = 64
"""From this number of decode rows on, programs of several tiles were measured to be faster."""


class StepTiles(NamedTuple):
    """Hold how the kernel of decode rows is launched: the value channels of a tile, the tiles of a program, and its warps."""

    columns: int
    tiles: int
    warps: int


def step_tiles(rows: int, dtype: torch.dtype, by_channel: bool = False) -> StepTiles:
    """Return the tiles for a number of decode rows with states of ``dtype``, as measured on an H200 for one decay of each head: a tile
    of 64 columns of 16 bits has the bytes of one of 32 columns in float32."""
    if dtype is torch.float32 or by_channel:
        return StepTiles(32, 1, 4)
    return StepTiles(64, 4 if rows >= MANY_ROWS else 1, 4)


@triton.jit
def _tile(
    own, values, a, b, rate, bias, tile, known, channel, KEY: tl.constexpr, VALUE: tl.constexpr,
    BY_CHANNEL: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Load what a row needs for a tile of a head: ``known`` rows of its state, the values, and what strength and decay are
    computed from."""
    per_head: tl.constexpr = (VALUE + BLOCK_V - 1) // BLOCK_V
    head, place = tile // per_head, tile % per_head * BLOCK_V + tl.arange(0, BLOCK_V)
    real = place < VALUE
    within = head * KEY * VALUE + channel[:, None] * VALUE + place[None, :]
    S = tl.load(own + within, (channel < known)[:, None] & real[None, :], 0.0)
    v = tl.load(values + head * VALUE + place, real, 0.0)
    if BY_CHANNEL:
        x = tl.load(a + head * KEY + channel, channel < KEY, 0.0)
        shift = tl.load(bias + head * KEY + channel, channel < KEY, 0.0)
    else:
        x, shift = tl.load(a + head), tl.load(bias + head)
    return S, v, x, shift, tl.load(b + head), tl.load(rate + head)


@triton.jit(do_not_specialize_on_alignment=ROWS)
def _step(
    qkv, a, b, rate, bias, state, out, slots, qkv_stride, a_stride, b_stride, state_stride, heads, scale,
    GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BY_CHANNEL: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Compute ``TILES`` tiles of a row. What the query reads of the new state follows from what it reads of the old one,
    ``q S' = q (d S) + (q k) change``, so that both products with the state are computed together."""
    per_head: tl.constexpr = (VALUE + BLOCK_V - 1) // BLOCK_V
    first, token = tl.program_id(0) * TILES, tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, BLOCK_K)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + token).to(tl.int64)
    key_width, source = heads // GROUP * KEY, qkv + token * qkv_stride
    keys = source + first // (per_head * GROUP) * KEY + channel
    q = tl.load(keys, channel < KEY, 0.0).to(tl.float32)
    k = tl.load(keys + key_width, channel < KEY, 0.0).to(tl.float32)
    own, values, known = state + slot * state_stride, source + 2 * key_width, tl.where(slot != 0, KEY, 0)
    a, b, results = a + token * a_stride, b + token * b_stride, out + token * heads * VALUE
    S, v, x, shift, strength, speed = _tile(
        own, values, a, b, rate, bias, first, known, channel, KEY, VALUE, BY_CHANNEL, BLOCK_V
    )
    q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
    k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    both = tl.sum(q * k, 0)
    for index in range(TILES):
        tile = first + index
        more = tl.where(index + 1 < TILES, known, 0)
        S_next, v_next, x_next, shift_next, strength_next, speed_next = _tile(
            own, values, a, b, rate, bias, tl.minimum(tile + 1, first + TILES - 1), more, channel, KEY, VALUE,
            BY_CHANNEL, BLOCK_V,
        )  # fmt: skip
        head, place = tile // per_head, tile % per_head * BLOCK_V + tl.arange(0, BLOCK_V)
        decay = tl.exp(-speed * softplus(x.to(tl.float32) + shift))
        decayed = S.to(tl.float32) * (decay[:, None] if BY_CHANNEL else decay)
        change = (v.to(tl.float32) - tl.sum(decayed * k[:, None], 0)) * tl.sigmoid(strength.to(tl.float32))
        result = tl.sum(decayed * q[:, None], 0) + both * change
        within = head * KEY * VALUE + channel[:, None] * VALUE + place[None, :]
        new = decayed + k[:, None] * change[None, :]
        tl.store(own + within, new, (channel < known)[:, None] & (place < VALUE)[None, :])
        tl.store(results + head * VALUE + place, result.to(out.dtype.element_ty), place < VALUE)
        S, v, x, shift, strength, speed = S_next, v_next, x_next, shift_next, strength_next, speed_next


def step(
    qkv: torch.Tensor, gates: DeltaGates, state: torch.Tensor, slots: torch.Tensor, shape: DeltaShape
) -> torch.Tensor:
    """Compute ``ops.gated_delta.gated_delta_step`` for one row or more."""
    heads, key_dim, value_dim = shape.state
    out = torch.empty(len(qkv), heads, value_dim, dtype=qkv.dtype, device=qkv.device)
    tiles = step_tiles(len(qkv), state.dtype, gates.by_channel)
    columns, per_head = _columns(value_dim, tiles.columns)
    count = math.gcd(tiles.tiles, per_head * (heads // shape.key_heads))
    launch(
        _step, (heads * per_head // count, len(qkv)),
        qkv, gates.a, gates.b, gates.rate, gates.bias, state, out, slots, qkv.stride(0), gates.a.stride(0),
        gates.b.stride(0), state.stride(0), heads, key_dim**-0.5,
        **kernel_sizes(shape), BY_CHANNEL=gates.by_channel, BLOCK_V=columns, TILES=count, num_warps=tiles.warps,
    )  # fmt: skip
    return out


def _columns(value_dim: int, limit: int) -> tuple[int, int]:
    """Return the value channels of a tile, and the tiles of a head."""
    columns = min(limit, max(16, triton.next_power_of_2(value_dim)))
    return columns, triton.cdiv(value_dim, columns)


def kernel_sizes(shape: DeltaShape) -> dict[str, int]:
    """Return the sizes that every kernel of the gated delta rule is compiled for."""
    return {
        "GROUP": shape.value_heads // shape.key_heads,
        "KEY": shape.key_dim,
        "VALUE": shape.value_dim,
        "BLOCK_K": max(16, triton.next_power_of_2(shape.key_dim)),
    }
