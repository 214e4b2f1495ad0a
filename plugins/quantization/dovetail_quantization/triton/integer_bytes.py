"""Compute products of 17 to 32 rows and a large weight of 4-bit integers in planes (``dovetail.ops.integers``) with tensor cores for bytes.

As for one row (``integer_one_row``), rows are rounded to integers of 16 bits with a scale for each 128 columns, which is finer than bfloat16 by
a factor of 64. A kernel of its own does that once, and divides each number into two bytes. Tensor cores multiply them with
the codes, of which eight become signed bytes by three instructions; bfloat16 takes eleven. Sums of 128 columns are exact.

As in ``integer_columns``, the rows of the weight are the columns of the product. Fewer rows, and smaller weights, gain less from that than the kernel
that rounds costs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.integers import PLANES, Integers
from dovetail.ops.triton.launch import INTERPRETED, launch, prefetch
from dovetail.ops.triton.matmul import Workspace, around, finish_rows, rows_of
from dovetail.ops.triton.sizes import cdiv
from dovetail.ops.triton.tuning import MAX_PARTS, MAX_TILES
from dovetail_quantization.triton.packed_rows import rounded

ROWS = tl.constexpr(32)
"""The number of rows that the kernels compute. Fewer are followed by zeros."""
FEWEST_ROWS = 17
LEAST_OUT = 16384
"""These kernels are used from this number of rows and for weights of this number of rows on, as measured on an H200."""
BYTES = tl.constexpr(PLANES // 2)
"""The bytes of a row of the weight in a block of planes, and the columns that their low or high bits are."""
_BLOCK = tl.constexpr(PLANES)
_AHEAD = tl.constexpr(256)  # the columns of a line of 128 bytes
_PLAIN = tl.constexpr(INTERPRETED)  # the interpreter has no assembly


class BytesTile(NamedTuple):
    """Describe how a product is divided into tiles, see ``ops.triton.tuning.ProductTile``. ``ahead`` lines of each row of a tile are
    fetched early."""

    block_n: int
    block_k: int
    warps: int
    stages: int
    split: int
    ahead: int


def bytes_tile(rows: int, weight: Integers) -> BytesTile | None:
    """Return the tile for ``rows`` rows, or None if these kernels are not used: they were not measured with zero points."""
    (n, k), zeros = (len(weight.codes), weight.columns), weight.zeros
    if not FEWEST_ROWS <= rows <= ROWS.value or n < LEAST_OUT or weight.bits != 4 or zeros is not None:
        return None
    if k % PLANES or weight.group % PLANES:
        return None
    tile = BytesTile(128, PLANES, 4, 4, 1, 4)
    tiles = cdiv(n, tile.block_n)
    most = min(528, MAX_PARTS // (tile.block_n * ROWS.value)) if tiles <= MAX_TILES else 0
    splits = [split for split in (2, 4) if k // PLANES % split == 0 and tiles * split <= most]
    return tile._replace(split=max(splits, default=1))


@triton.jit(do_not_specialize=["m"])
def bytes_of_rows(x, out, scales, m, k, BLOCKS: tl.constexpr, PDL: tl.constexpr) -> None:
    """Round one of ROWS rows: those of ``x [m, k]``, then zeros. Write high bytes, then low ones to ``out`` (int8 ``[k / 128, 2, 2, ROWS, 64]``), of
    each first the columns of low bits of codes, then those of high bits; and the scale of each block to ``scales [k / 128, ROWS]``."""
    token, block = tl.program_id(0), tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    at = tl.arange(0, _BLOCK)
    byte, plane = at % BYTES, at // BYTES
    column = byte // 2 + byte % 2 * BYTES + plane * (BYTES // 2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    source = x + token * k + block[:, None] * _BLOCK + column[None, :]
    present = block[:, None] < tl.where(token < m, k // _BLOCK, 0)
    numbers = tl.load(source, present, 0.0).to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(numbers), 1), 1e-30)
    # 32512 = 127 * 256: the high byte of a rounded number is signed
    high, low = rounded(numbers, tl.broadcast_to((32512.0 / most)[:, None], numbers.shape))
    place = out + block[:, None] * (4 * ROWS * BYTES) + (plane * (ROWS * BYTES) + token * BYTES + byte)[None, :]
    tl.store(place, high.to(tl.int8))
    tl.store(place + 2 * ROWS * BYTES, low.to(tl.int8))
    tl.store(
        scales + block * ROWS + token, most * (1.0 / 32512.0 / 16.0)
    )  # the bytes of codes are 16 times their numbers


@triton.jit
def signed_planes(codes):
    """Return 16 times the numbers, less 8, in the low bits and in the high bits of ``codes`` (int8)."""
    if _PLAIN:
        low = ((codes.to(tl.int32) & 15) - 8) * 16
        high = ((codes.to(tl.int32) >> 4 & 15) - 8) * 16
        return low.to(tl.int8), high.to(tl.int8)
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 s;
            shl.b32 s, $2, 4; lop3.b32 $0, s, 0xF0F0F0F0, 0x80808080, 0x6a;
            lop3.b32 $1, $2, 0xF0F0F0F0, 0x80808080, 0x6a; }""",
            "=r,=r,r", [codes], dtype=(tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def _dot(left, right, total):
    if _PLAIN:
        return total + tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee").to(tl.int32)
    return tl.dot(left, right, total, out_dtype=tl.int32)


@triton.jit(do_not_specialize=["m"])
def plane_bytes(
    x, x_scales, w, scales, bias, y, parts, arrived, m, n, k, span, group: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, IN_PARTS: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply m rows, of which ``bytes_of_rows`` made ``x`` and ``x_scales``, with codes ``w`` (int8 ``[n, k / 2]``) in planes. Before it
    waits for the previous kernel, a program fetches AHEAD lines (a power of two, or 0) of its rows of the weight to the L2 cache. Programs
    begin at different columns, see ``around``."""
    tile, part = tl.program_id(0), tl.program_id(1)
    rows = rows_of(tile, n, GATED, BLOCK_N)
    size: tl.constexpr = ROWS * BYTES
    token = tl.arange(0, ROWS)
    at = tl.arange(0, BYTES)
    begin = part * span
    own = w + rows.to(tl.int64) * tl.multiple_of(k // 2, BYTES)
    source = own[None, :] + at[:, None]
    tokens = x + token[:, None] * BYTES + at[None, :]
    first = tl.multiple_of(tile * BLOCK_K % span, BLOCK_K)
    if PDL:
        gdc_launch_dependents()
        if AHEAD:
            line = tl.minimum(tl.arange(0, AHEAD) * _AHEAD, span - 1) + first
            line -= tl.where(line >= span, span, 0)
            prefetch(own[:, None] + (begin + line)[None, :] // 2)
        gdc_wait()
    total = tl.zeros([ROWS, BLOCK_N], tl.float32)
    nothing = tl.zeros([ROWS, BLOCK_N], tl.int32)
    for start in tl.range(0, span, BLOCK_K, num_stages=STAGES):
        for inner in tl.static_range(BLOCK_K // _BLOCK):
            here = begin + around(start, first, span, BLOCK_K) + inner * _BLOCK
            block = here // _BLOCK
            scale = tl.load(scales + here // group * n + rows)
            x_scale = tl.load(x_scales + block * ROWS + token)
            codes = tl.load(source + tl.multiple_of(block * BYTES, BYTES), eviction_policy="evict_first")
            low, high = signed_planes(codes)
            upper = _dot(tl.load(tokens + block * (4 * size)), low, nothing)
            upper = _dot(tl.load(tokens + block * (4 * size) + size), high, upper)
            lower = _dot(tl.load(tokens + block * (4 * size) + 2 * size), low, nothing)
            lower = _dot(tl.load(tokens + block * (4 * size) + 3 * size), high, lower)
            total += (upper * 256 + lower).to(tl.float32) * x_scale[:, None] * scale[None, :]
    finish_rows(
        tl.trans(total), y, bias, parts, arrived, rows, tile, part, m, n, GATED, BIAS, ROWS, BLOCK_N, SPLIT, IN_PARTS
    )


def multiply_bytes(
    x: torch.Tensor, weight: Integers, bias: torch.Tensor | None, y: torch.Tensor, gated: int, tile: BytesTile, space: Workspace,
    *, in_parts: bool,
) -> None:  # fmt: skip
    """Write the product of ``x [m, k]``, of 16 bits, and a weight with the words of ``integer_rows.with_words`` to ``y [m, n]``, or its gate to
    ``y [m, n / 2]``, or its parts to ``y [split, m, n]``."""
    (m, k), n, rows = x.shape, len(weight.codes), ROWS.value
    blocks = k // PLANES
    codes = torch.empty(2 * rows * k, dtype=torch.int8, device=x.device)
    scales = torch.empty(blocks * rows, dtype=torch.float32, device=x.device)
    each = min(blocks & -blocks, 4)
    launch(bytes_of_rows, (rows, blocks // each), x, codes, scales, m, k, BLOCKS=each, num_warps=2)
    launch(
        plane_bytes, (cdiv(n, tile.block_n), tile.split),
        codes, scales, weight.codes.view(torch.int8), weight.scales, bias, y, space.parts, space.arrived,
        m, n, k, k // tile.split, weight.group,
        GATED=gated, BIAS=bias is not None, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        SPLIT=tile.split, IN_PARTS=in_parts, STAGES=tile.stages, AHEAD=tile.ahead,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
