"""Compute the gated delta rule for decode rows. A program computes tiles of value channels one after the other, all with the
same key head, and loads the next one meanwhile.

The key and the query of a row are multiplied with the old state. Tensor cores do it if the state has the dtype of keys and queries,
of 16 bits: products of two such numbers are exact in float32, and the norms of key and query are applied to the sums. Without tensor
cores, sums over the warps of a program take longer than the memory needs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.sizes import cdiv, next_power_of_2
from dovetail.ops.triton.ssd import ROWS, softplus

if TYPE_CHECKING:
    from dovetail.interfaces.mixer_shapes import DeltaGates, DeltaShape


SOME_ROWS, MANY_ROWS = 16, 128
"""From the first number of decode rows on, wider tiles or several in a program were measured to be faster. With at least the second number,
tensor cores are fastest with one tile in a program."""
_SIDE = tl.constexpr(16)
"""Tensor cores multiply a state with this number of vectors, of which two are used."""


class StepTiles(NamedTuple):
    """Hold how the kernel of decode rows is launched: the value channels of a tile, the tiles of a program, and its warps."""

    columns: int
    tiles: int
    warps: int


def step_tiles(rows: int, dtype: torch.dtype, by_channel: bool = False, products: bool = False) -> StepTiles:
    """Return the tiles for a number of decode rows with states of ``dtype``, as measured on an H200 for one decay of each head.
    ``products``: tensor cores multiply the states."""
    if by_channel:
        return StepTiles(32, 1, 4)
    if dtype is torch.float32:
        return StepTiles(64 if rows >= SOME_ROWS else 32, 1, 4)
    if products:
        return StepTiles(64, 2 if SOME_ROWS <= rows < MANY_ROWS else 1, 4)
    return StepTiles(64, 4 if rows >= MANY_ROWS // 2 else 1, 4)


@triton.jit
def _tile(
    own, values, a, b, rate, bias, tile, known, channel, KEY: tl.constexpr, VALUE: tl.constexpr,
    BY_CHANNEL: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Load what a row needs for a tile of a head: ``known`` rows of its state, the values, and what strength and decay are
    computed from."""
    per_head: tl.constexpr = (VALUE + BLOCK_V - 1) // BLOCK_V
    head, place = tile // per_head, tile % per_head * BLOCK_V + tl.arange(0, BLOCK_V)
    within = head * KEY * VALUE + channel[:, None] * VALUE + place[None, :]
    if VALUE % BLOCK_V:
        S = tl.load(own + within, (channel < known)[:, None] & (place < VALUE)[None, :], 0.0)
        v = tl.load(values + head * VALUE + place, place < VALUE, 0.0)
    else:
        S = tl.load(own + within, (channel < known)[:, None], 0.0)
        v = tl.load(values + head * VALUE + place)
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
    BLOCK_V: tl.constexpr, TILES: tl.constexpr, PRODUCTS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Compute ``TILES`` tiles of a row, with tensor cores if PRODUCTS. What the query reads of the new state follows from what it
    reads of the old one, ``q S' = q (d S) + (q k) change``, so that both products with the state are computed together."""
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
    q_scale, k_scale = tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale, tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    q, k = q * q_scale, k * k_scale
    both = tl.sum(q * k, 0)
    side = tl.arange(0, _SIDE)[None, :]
    if PRODUCTS:  # the key and the query as they are, in the first two columns
        vectors = source + first // (per_head * GROUP) * KEY + tl.where(side == 0, key_width, 0) + channel[:, None]
        pair = tl.load(vectors, (side < 2) & (channel < KEY)[:, None], 0.0)
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
        if PRODUCTS:
            read = tl.dot(tl.trans(S), pair)  # [BLOCK_V, _SIDE]
            by_key = tl.sum(tl.where(side == 0, read, 0.0), 1) * (decay * k_scale)
            by_query = tl.sum(tl.where(side == 1, read, 0.0), 1) * (decay * q_scale)
        else:
            by_key, by_query = tl.sum(decayed * k[:, None], 0), tl.sum(decayed * q[:, None], 0)
        change = (v.to(tl.float32) - by_key) * tl.sigmoid(strength.to(tl.float32))
        result = by_query + both * change
        within = head * KEY * VALUE + channel[:, None] * VALUE + place[None, :]
        new = (decayed + k[:, None] * change[None, :]).to(state.dtype.element_ty)
        if VALUE % BLOCK_V:
            tl.store(own + within, new, (channel < known)[:, None] & (place < VALUE)[None, :])
            tl.store(results + head * VALUE + place, result.to(out.dtype.element_ty), place < VALUE)
        else:
            tl.store(own + within, new, (channel < known)[:, None])
            tl.store(results + head * VALUE + place, result.to(out.dtype.element_ty))
        S, v, x, shift, strength, speed = S_next, v_next, x_next, shift_next, strength_next, speed_next


def multiplies(qkv: torch.Tensor, gates: DeltaGates, state: torch.Tensor, shape: DeltaShape) -> bool:
    """Return whether tensor cores multiply the states of these rows: with one decay of each head, 16 bits, and heads that consist of whole
    tiles."""
    whole = shape.key_dim % 16 == 0 and shape.value_dim % 64 == 0
    return whole and state.dtype == qkv.dtype and state.element_size() == 2 and not gates.by_channel


def step(
    qkv: torch.Tensor, gates: DeltaGates, state: torch.Tensor, slots: torch.Tensor, shape: DeltaShape
) -> torch.Tensor:
    """Compute ``ops.gated_delta.gated_delta_step`` for one row or more."""
    heads, key_dim, value_dim = shape.state
    out = torch.empty(len(qkv), heads, value_dim, dtype=qkv.dtype, device=qkv.device)
    products = multiplies(qkv, gates, state, shape)
    tiles = step_tiles(len(qkv), state.dtype, gates.by_channel, products)
    columns, per_head = _columns(value_dim, tiles.columns)
    count = math.gcd(tiles.tiles, per_head * (heads // shape.key_heads))
    launch(
        _step, (heads * per_head // count, len(qkv)),
        qkv, gates.a, gates.b, gates.rate, gates.bias, state, out, slots, qkv.stride(0), gates.a.stride(0),
        gates.b.stride(0), state.stride(0), heads, key_dim**-0.5,
        **kernel_sizes(shape), BY_CHANNEL=gates.by_channel, BLOCK_V=columns, TILES=count,
        PRODUCTS=products, num_warps=tiles.warps,
    )  # fmt: skip
    return out


def _columns(value_dim: int, limit: int) -> tuple[int, int]:
    """Return the value channels of a tile, and the tiles of a head."""
    columns = min(limit, max(16, next_power_of_2(value_dim)))
    return columns, cdiv(value_dim, columns)


def kernel_sizes(shape: DeltaShape) -> dict[str, int]:
    """Return the sizes that every kernel of the gated delta rule is compiled for."""
    return {
        "GROUP": shape.value_heads // shape.key_heads,
        "KEY": shape.key_dim,
        "VALUE": shape.value_dim,
        "BLOCK_K": max(16, next_power_of_2(shape.key_dim)),
    }
