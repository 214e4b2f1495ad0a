"""Compute the product of one row and a weight of 4-bit integers in planes (``dovetail.ops.integers``).

Tensor cores would be idle for seven of eight rows. Therefore the row is rounded to integers of 16 bits with a scale for each 128
columns, which is finer than bfloat16 by a factor of 64, and instructions that add up four products of bytes (dp4a) multiply it with the
codes as they are stored, as for GGUF (``packed_rows``). Sums of 128 columns are exact. A program rounds its part of the row once, and then
computes one tile of the weight after another; codes and scales of the next tile are read ahead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.integers import PLANES, Integers
from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.matmul import finish_row, rows_of
from dovetail.ops.triton.sizes import cdiv, next_power_of_2
from dovetail_quantization.integer_tensors import narrowed
from dovetail_quantization.triton.one_row import OneRowTile, parts_of
from dovetail_quantization.triton.packed_rows import byte_sums, rounded

WORDS = tl.constexpr(16)  # words of 32 bits in a block of planes
SCALE_ROWS = tl.constexpr(64)
"""The rows of a tile of scales, see ``with_scales_in_tiles``."""
LEAST_OUT = 16384
"""From this number of rows of the weight on, scales are in tiles: on an H200, smaller weights gained nothing."""


def one_row_tile(n: int, k: int, group: int, *, in_parts: bool = False) -> OneRowTile | None:
    """Return the tile of a weight ``[n, k]`` with groups of ``group`` columns, or None if there is none. ``in_parts``: it divides the
    columns. Of the tiles that ``benchmarks/integer_gpu.py`` tries, these are the fastest for the sizes of an 8B model on an H200."""
    split = parts_of(k, in_parts=in_parts)
    if not n or group % PLANES or split is None:
        return None
    block_k = max(next_power_of_2(k // split), 1024)
    warps = max(1, min(16, block_k // 512))
    if in_parts:
        return OneRowTile(16, block_k, warps, 4, split)
    return OneRowTile(8, block_k, warps, max(1, 24 // warps), split)


def with_scales_in_tiles(weight: Integers) -> Integers:
    """Return a weight whose scales are ``[out / SCALE_ROWS, groups, SCALE_ROWS]``, in 16 bits if these hold all of them, if it is
    large; otherwise the same weight. A program reads the scales of a few rows and all groups, which are close to each other then."""
    n, scales = len(weight.codes), weight.scales
    if n < LEAST_OUT or n % SCALE_ROWS.value:
        return weight
    tiles = narrowed(scales).unflatten(1, (-1, SCALE_ROWS.value)).transpose(0, 1).contiguous()
    return weight._replace(scales=tiles)


@triton.jit
def scale_place(rows, groups, TILED: tl.constexpr):
    """Return where the scales of ``rows`` begin. Those of the next group are SCALE_ROWS later, or, unless TILED, as many as the rows are."""
    if TILED:
        return rows // SCALE_ROWS * (groups * SCALE_ROWS) + rows % SCALE_ROWS
    return rows


@triton.jit
def adjacent(x, place, inside, BFLOAT16: tl.constexpr):
    """Return two adjacent numbers of 16 bits at each ``place``, in float32. ``x`` is int32."""
    both = tl.load(x + place, inside, 0)
    if BFLOAT16:
        return (both << 16).to(tl.float32, bitcast=True), (both & -65536).to(tl.float32, bitcast=True)
    low, high = both.to(tl.int16), (both >> 16).to(tl.int16)
    return low.to(tl.float16, bitcast=True).to(tl.float32), high.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def packed_bytes(a, b, c, d, inverse):
    """Return the high bytes and the low bytes of four numbers, rounded, in the bytes of a word each, and the sum of the four."""
    a_high, a_low = rounded(a, inverse)
    b_high, b_low = rounded(b, inverse)
    c_high, c_low = rounded(c, inverse)
    d_high, d_low = rounded(d, inverse)
    high = a_high & 255 | (b_high & 255) << 8 | (c_high & 255) << 16 | d_high << 24
    low = a_low & 255 | (b_low & 255) << 8 | (c_low & 255) << 16 | d_low << 24
    return high, low, (a_high + b_high + c_high + d_high) * 256 + a_low + b_low + c_low + d_low


@triton.jit
def largest_of(a, b, c, d):
    """Return the largest absolute value of four."""
    return tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))


@triton.jit
def in_blocks(words, BLOCK_K: tl.constexpr):
    """Return ``words`` in rows that belong to the same block of planes."""
    return tl.reshape(words, [BLOCK_K // 8 // WORDS, WORDS])


@triton.jit(do_not_specialize=["tiles"])
def one_plane_row(
    x, w, scales, zeros, bias, y, n, k, span, group, tiles,
    BFLOAT16: tl.constexpr, TILED: tl.constexpr, ZEROS: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply one row, ``x`` (int32 ``[k / 2]``), with codes ``w`` (int32 ``[n, k / 8]``). A part has ``span`` columns, at most BLOCK_K;
    if there are several, ``y`` is ``[parts, n]``. TILED: scales are those of ``with_scales_in_tiles``."""
    index, programs, part = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    at = tl.arange(0, BLOCK_K // 8)
    block = tl.arange(0, BLOCK_K // 8 // WORDS)
    blocks = span // (8 * WORDS)
    words = tl.multiple_of(k // 8, WORDS)
    begin = tl.multiple_of(part * blocks * WORDS, 16 * WORDS)  # there is one part, or each has 16 blocks
    own = ((part * span + block * (8 * WORDS)) // group)[None, :]
    groups = k // group
    scales += own * (SCALE_ROWS if TILED else n)
    if ZEROS:
        zeros += own * n
    inside = at < tl.multiple_of(blocks * WORDS, WORDS)
    x += begin * 4
    w += begin
    y += part * n
    rows = rows_of(index, n, GATED, BLOCK_N)
    if PDL:
        gdc_launch_dependents()
    source = w + rows.to(tl.int64)[:, None] * words + at[None, :]
    codes = tl.load(source, inside[None, :], 0, eviction_policy="evict_first")
    scale = tl.load(scales + scale_place(rows, groups, TILED)[:, None], (block < blocks)[None, :], 0.0).to(tl.float32)
    middle = tl.full([BLOCK_N, BLOCK_K // 8 // WORDS], 8.0, tl.float32)
    if ZEROS:
        middle = tl.load(zeros + rows[:, None], (block < blocks)[None, :], 0.0)
    if PDL:
        gdc_wait()
    place = at // WORDS * (4 * WORDS) + at % WORDS  # of the numbers that belong to the lowest bits of each word
    a0, a1 = adjacent(x, place, inside, BFLOAT16)
    b0, b1 = adjacent(x, place + WORDS, inside, BFLOAT16)
    c0, c1 = adjacent(x, place + 2 * WORDS, inside, BFLOAT16)
    d0, d1 = adjacent(x, place + 3 * WORDS, inside, BFLOAT16)
    largest = tl.maximum(largest_of(a0, a1, b0, b1), largest_of(c0, c1, d0, d1))
    most = tl.maximum(tl.max(in_blocks(largest, BLOCK_K), 1), 1e-30)
    # 32512 = 127 * 256: the high byte of a rounded number is signed
    inverse = tl.broadcast_to((32512.0 / most)[:, None], [BLOCK_K // 8 // WORDS, WORDS])
    inverse = tl.reshape(inverse, [BLOCK_K // 8])
    high, low, whole = packed_bytes(a0, c0, a1, c1, inverse)
    high_after, low_after, more = packed_bytes(b0, d0, b1, d1, inverse)
    whole = tl.sum(in_blocks(whole + more, BLOCK_K), 1).to(tl.float32)
    most *= 1.0 / 32512.0
    for tile in range(index, tiles, programs):
        following = rows_of(tile + programs, n, GATED, BLOCK_N)
        left = tl.where(tile + programs < tiles, blocks, 0)
        source = w + following.to(tl.int64)[:, None] * words + at[None, :]
        needed = (at < tl.multiple_of(left * WORDS, WORDS))[None, :]
        codes_ahead = tl.load(source, needed, 0, eviction_policy="evict_first")
        remains = (block < left)[None, :]
        scale_ahead = tl.load(scales + scale_place(following, groups, TILED)[:, None], remains, 0.0).to(tl.float32)
        middle_ahead = middle
        if ZEROS:
            middle_ahead = tl.load(zeros + following[:, None], remains, 0.0)
        first = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.int32)
        second = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.int32)
        first = byte_sums(codes & 0x0F0F0F0F, high[None, :], first)
        second = byte_sums(codes & 0x0F0F0F0F, low[None, :], second)
        first = byte_sums(codes >> 4 & 0x0F0F0F0F, high_after[None, :], first)
        second = byte_sums(codes >> 4 & 0x0F0F0F0F, low_after[None, :], second)
        sums = tl.sum(tl.reshape(first * 256 + second, [BLOCK_N, BLOCK_K // 8 // WORDS, WORDS]), 2)
        total = (sums.to(tl.float32) - whole[None, :] * middle) * (most[None, :] * scale)
        finish_row(y, bias, rows, total, tile, n, GATED, BIAS, BLOCK_N)
        codes, scale, middle, rows = codes_ahead, scale_ahead, middle_ahead, following


def multiply_one(
    x: torch.Tensor, weight: Integers, bias: torch.Tensor | None, y: torch.Tensor, gated: int, tile: OneRowTile
) -> None:
    """Write the product of ``x [1, k]``, of 16 bits, and a weight of ``with_scales_in_tiles`` to ``y [1, n]``, or its gate to
    ``y [1, n / 2]``. With a tile that divides the columns, write the parts of the product to ``y [split, 1, n]``."""
    n, k = len(weight.codes), weight.columns
    launch(
        one_plane_row, tile.grid(n, x.device),
        x.view(torch.int32), weight.codes.view(torch.int32), weight.scales, weight.zeros, bias, y, n, k, k // tile.split, weight.group,
        cdiv(n, tile.block_n),
        BFLOAT16=x.dtype is torch.bfloat16, TILED=weight.scales.dim() == 3, ZEROS=weight.zeros is not None, GATED=gated, BIAS=bias is not None,
        BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, num_warps=tile.warps,
    )  # fmt: skip
