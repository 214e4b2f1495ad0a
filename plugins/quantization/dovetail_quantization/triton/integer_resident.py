"""Compute products of up to ``MOST_ROWS`` rows and a weight of 4-bit integers in planes (``dovetail.ops.integers``), with the rows held in
registers.

Of few rows, reading ``x`` again for each tile of the weight takes as long as reading the tile. Therefore each warp holds some columns of ``x``, and
multiplies them with the codes of these columns in one tile of the weight after another; the warps of a program add up what they
find. A warp loads codes in the order in which its tensor cores take them, 16 bytes a thread, and only registers are renamed in between:
``_operand`` changes the order of columns, of ``x`` too. Codes become the last bits of 128 (bfloat16) or 1024 (float16), and the sum of the
columns of ``x`` is subtracted as often afterwards. Sums of a group are multiplied by its scale. Codes and scales of the next tile are read
ahead.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.integers import PLANES, Integers
from dovetail.ops.triton.integers import PLANE
from dovetail.ops.triton.launch import INTERPRETED, launch, processors
from dovetail.ops.triton.matmul import gate

MOST_ROWS = 16
"""Up to this number of rows there is a kernel."""
_PLAIN = tl.constexpr(INTERPRETED)  # the interpreter has no assembly
# Of axes that are alike, Triton gives the first to the threads of a warp up to version 3.6, and the last in later ones.
_REVERSED = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7))


class ResidentTile(NamedTuple):
    """Describe how the product is divided: rows of ``x``, at least as many as there are, rows of the weight of a tile, warps of a program, blocks of
    columns that each warp holds (1 or 2), programs of a multiprocessor, and parts of the columns."""

    block_m: int
    block_n: int
    warps: int
    blocks: int
    per_sm: int
    split: int = 1


def resident_tile(rows: int, k: int, group: int, *, in_parts: bool = False) -> ResidentTile | None:
    """Return the tile for ``rows`` rows and a weight with ``k`` columns in groups of ``group``, or None if there is none. ``in_parts``: it divides
    the columns. ``benchmarks/integer_gpu.py`` tries others. Not measured yet."""
    if group % PLANES or k % PLANES or not 0 < rows <= MOST_ROWS:
        return None
    block_m = 8 if rows <= 8 else 16
    if not in_parts:
        blocks = k // PLANES
        if blocks > 32:
            return None
        return ResidentTile(block_m, 16, max(4, min(16, triton.next_power_of_2(blocks) // 2)), 2, 1)
    for warps, blocks, columns in ((8, 1, 4096), (8, 2, 32768)):
        span = warps * blocks * PLANES
        if k % span == 0 and span < k <= columns:
            return ResidentTile(block_m, 16 if blocks == 1 else 32, warps, blocks, 2 if blocks == 1 else 1, k // span)
    return None


@triton.jit
def _along(numbers, AXIS: tl.constexpr, CODES: tl.constexpr):
    """Return ``numbers`` along an axis of a tensor that is loaded: rows in eights (0), warps (1), rows of eight (2), and either adjacent columns, if CODES,
    or the four threads that have the same rows (3). The compiler gives the last axes to threads and the first to warps, or the reverse."""
    if _REVERSED:
        if AXIS == 0:
            found = numbers[None, None, :, None] if CODES else numbers[None, None, None, :]
        elif AXIS == 1:
            found = numbers[None, :, None, None] if CODES else numbers[None, None, :, None]
        elif AXIS == 2:
            found = numbers[:, None, None, None] if CODES else numbers[None, :, None, None]
        else:
            found = numbers[None, None, None, :] if CODES else numbers[:, None, None, None]
    elif AXIS == 0:
        found = numbers[:, None, None, None]
    elif AXIS == 1:
        found = numbers[None, :, None, None]
    elif AXIS == 2:
        found = numbers[None, None, :, None]
    else:
        found = numbers[None, None, None, :]
    return found


@triton.jit
def _operand(numbers, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """Return ``numbers``, with the axes of ``_along``, as ``[WARPS, ROWS, PLANE]``, with the columns that a thread has loaded where tensor cores
    take them from this thread."""
    if _REVERSED:
        fine = tl.permute(tl.reshape(numbers, [8, WARPS, ROWS // 8, 4, 4, 2]), (1, 2, 0, 4, 3, 5))
    else:
        fine = tl.permute(tl.reshape(numbers, [ROWS // 8, WARPS, 8, 4, 4, 2]), (1, 0, 2, 4, 3, 5))
    return tl.reshape(fine, [WARPS, ROWS, PLANE])


@triton.jit
def _raised(codes, DTYPE: tl.constexpr):
    """Return the numbers in the four planes of ``codes`` (int16), plus 128 (bfloat16) or 1024 (float16)."""
    if _PLAIN:
        more: tl.constexpr = 128 if DTYPE.is_bf16() else 1024
        return (
            ((codes & 15) + more).to(DTYPE), ((codes >> 4 & 15) + more).to(DTYPE),
            ((codes >> 8 & 15) + more).to(DTYPE), ((codes >> 12 & 15) + more).to(DTYPE),
        )  # fmt: skip
    elif DTYPE.is_bf16():
        return tl.inline_asm_elementwise(
            """{ .reg .b32 s;
            lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xea;
            shr.b32 s, $4, 4;  lop3.b32 $1, s, 0x000F000F, 0x43004300, 0xea;
            shr.b32 s, $4, 8;  lop3.b32 $2, s, 0x000F000F, 0x43004300, 0xea;
            shr.b32 s, $4, 12; lop3.b32 $3, s, 0x000F000F, 0x43004300, 0xea; }""",
            "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 s;
            lop3.b32 $0, $4, 0x000F000F, 0x64006400, 0xea;
            shr.b32 s, $4, 4;  lop3.b32 $1, s, 0x000F000F, 0x64006400, 0xea;
            shr.b32 s, $4, 8;  lop3.b32 $2, s, 0x000F000F, 0x64006400, 0xea;
            shr.b32 s, $4, 12; lop3.b32 $3, s, 0x000F000F, 0x64006400, 0xea; }""",
            "=r,=r,=r,=r,r", [codes], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def _load_x(x, inside, BLOCK_M: tl.constexpr, WARPS: tl.constexpr):
    """Return the columns of a plane of each warp's block, ``[WARPS, PLANE, BLOCK_M]``."""
    return tl.permute(_operand(tl.load(x, inside, 0.0), BLOCK_M, WARPS), (0, 2, 1))


@triton.jit
def _resident(x, inside, BLOCK_M: tl.constexpr, WARPS: tl.constexpr):
    """Return the four planes of ``x`` of each warp's block and the sums of the block, ``[WARPS, 1, 1, BLOCK_M / 8, 4, 2]``."""
    x0 = _load_x(x, inside, BLOCK_M, WARPS)
    x1 = _load_x(x + PLANE, inside, BLOCK_M, WARPS)
    x2 = _load_x(x + 2 * PLANE, inside, BLOCK_M, WARPS)
    x3 = _load_x(x + 3 * PLANE, inside, BLOCK_M, WARPS)
    one = tl.full([WARPS, 16, PLANE], 1.0, x.dtype.element_ty)  # the sums in the layout in which they are subtracted
    sums = tl.dot(one, x0)
    sums = tl.dot(one, x1, sums)
    sums = tl.dot(one, x2, sums)
    sums = tl.max(tl.dot(one, x3, sums), 1)
    return x0, x1, x2, x3, tl.reshape(sums, [WARPS, 1, 1, BLOCK_M // 8, 4, 2])


@triton.jit
def _of_rows(factors, BLOCK_N: tl.constexpr, WARPS: tl.constexpr):
    """Return ``factors``, with the axes of ``_along``, in the order of sums."""
    factors = tl.permute(factors, (2, 3, 1, 0)) if _REVERSED else tl.permute(factors, (1, 0, 2, 3))
    return tl.reshape(factors, [WARPS, BLOCK_N // 8, 8, 1, 4, 1])


@triton.jit
def _scaled_sums(
    codes, scale, middle, x0, x1, x2, x3, of_x,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return the products of each warp's block, ``[WARPS, BLOCK_N / 8, 8, BLOCK_M / 8, 4, 2]``."""
    p0, p1, p2, p3 = _raised(codes, DTYPE)
    sums = tl.dot(_operand(p0, BLOCK_N, WARPS), x0)
    sums = tl.dot(_operand(p1, BLOCK_N, WARPS), x1, sums)
    sums = tl.dot(_operand(p2, BLOCK_N, WARPS), x2, sums)
    sums = tl.dot(_operand(p3, BLOCK_N, WARPS), x3, sums)
    sums = tl.reshape(sums, [WARPS, BLOCK_N // 8, 8, BLOCK_M // 8, 4, 2])
    more: tl.constexpr = 128.0 if DTYPE.is_bf16() else 1024.0
    return (sums - of_x * (_of_rows(middle, BLOCK_N, WARPS) + more)) * _of_rows(scale, BLOCK_N, WARPS)


@triton.jit
def _row_at(tile, local, n, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the row of the weight at place ``local`` of a tile. If GATED, eight gates (the first half of the rows) are followed by their values."""
    if GATED:
        pair = tile * (BLOCK_N // 2) + local // 16 * 8 + local % 8
        return tl.minimum(pair, n // 2 - 1) + local // 8 % 2 * (n // 2)
    return tl.minimum(tile * BLOCK_N + local, n - 1)


@triton.jit
def _finish(
    y, bias, total, tile, m, n, GATED: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
) -> None:
    """Write ``total [BLOCK_N / 8, 8, BLOCK_M / 8, 4, 2]`` plus the bias, or the gate of that, to ``y``."""
    total = tl.reshape(total, [BLOCK_N, BLOCK_M])
    if BIAS:
        total += tl.load(bias + _row_at(tile, tl.arange(0, BLOCK_N), n, GATED, BLOCK_N)).to(tl.float32)[:, None]
    token = tl.arange(0, BLOCK_M)[None, :]
    columns: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    width = n // 2 if GATED else n
    if GATED:
        pairs = tl.permute(tl.reshape(total, [BLOCK_N // 16, 2, 8, BLOCK_M]), (0, 2, 3, 1))
        opens, up = tl.split(pairs)
        total = tl.reshape(gate(opens, up, GATED), [columns, BLOCK_M])
    column = tile * columns + tl.arange(0, columns)[:, None]
    tl.store(y + token * width + column, total.to(y.dtype.element_ty), (token < m) & (column < width))


@triton.jit(do_not_specialize=["m", "tiles"])
def resident_rows(
    x, w, scales, zeros, bias, y, m, n, k, span, group, tiles,
    ZEROS: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply ``x [m, k]`` with codes ``w`` (int16 ``[n, k / 4]``). ``scales`` and ``zeros`` are float32. A part has ``span`` columns, at most
    ``WARPS * BLOCKS`` blocks; if there are several, ``y`` is ``[parts, m, n]``."""
    index, programs, part = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    dtype: tl.constexpr = x.dtype.element_ty
    words = tl.multiple_of(k // 4, PLANE)
    eights, rows_of_eight, four = tl.arange(0, BLOCK_N // 8) * 8, tl.arange(0, 8), tl.arange(0, 4) * 0
    local = _along(eights, 0, True) + _along(rows_of_eight, 2, True)
    local_factor = _along(eights, 0, False) + _along(rows_of_eight, 2, False)
    blocks = span // (4 * PLANE)
    warp, at = tl.arange(0, WARPS) * BLOCKS, _along(tl.arange(0, PLANE), 3, True)
    first = part * blocks + warp
    place = _along(first, 1, True) * PLANE + at
    own = _along(first * (4 * PLANE) // group * n, 1, False) + _along(four, 3, False)
    own_next = _along((first + 1) * (4 * PLANE) // group * n, 1, False) + _along(four, 3, False)
    mine, mine_factor = _along(warp, 1, True), _along(warp, 1, False)
    has, has_next = mine < blocks, mine + 1 < blocks
    y += part.to(tl.int64) * m * n
    rows = _row_at(index, local_factor, n, GATED, BLOCK_N)
    if PDL:
        gdc_launch_dependents()
    source = w + _row_at(index, local, n, GATED, BLOCK_N) * words + place
    codes = tl.load(source, has, 0, eviction_policy="evict_first")
    scale = tl.load(scales + own + rows, mine_factor < blocks, 0.0)
    middle = tl.full(scale.shape, 8.0, tl.float32)
    middle_next = middle
    if ZEROS:
        middle = tl.load(zeros + own + rows, mine_factor < blocks, 0.0)
    if BLOCKS == 2:
        codes_next = tl.load(source + PLANE, has_next, 0, eviction_policy="evict_first")
        scale_next = tl.load(scales + own_next + rows, mine_factor + 1 < blocks, 0.0)
        if ZEROS:
            middle_next = tl.load(zeros + own_next + rows, mine_factor + 1 < blocks, 0.0)
    if PDL:
        gdc_wait()
    token = _along(tl.arange(0, BLOCK_M // 8) * 8, 0, True) + _along(rows_of_eight, 2, True)
    tokens = x + token * k + _along(first * (4 * PLANE), 1, True) + at
    present = token < m
    x0, x1, x2, x3, of_x = _resident(tokens, present & has, BLOCK_M, WARPS)
    if BLOCKS == 2:
        x4, x5, x6, x7, of_next = _resident(tokens + 4 * PLANE, present & has_next, BLOCK_M, WARPS)
    for tile in range(index, tiles, programs):
        left = tl.where(tile + programs < tiles, blocks, 0)
        rows = _row_at(tile + programs, local_factor, n, GATED, BLOCK_N)
        source = w + _row_at(tile + programs, local, n, GATED, BLOCK_N) * words + place
        total = _scaled_sums(codes, scale, middle, x0, x1, x2, x3, of_x, BLOCK_M, BLOCK_N, WARPS, dtype)
        codes = tl.load(source, mine < left, 0, eviction_policy="evict_first")
        scale = tl.load(scales + own + rows, mine_factor < left, 0.0)
        if ZEROS:
            middle = tl.load(zeros + own + rows, mine_factor < left, 0.0)
        if BLOCKS == 2:
            total += _scaled_sums(
                codes_next, scale_next, middle_next, x4, x5, x6, x7, of_next, BLOCK_M, BLOCK_N, WARPS, dtype
            )
            codes_next = tl.load(source + PLANE, mine + 1 < left, 0, eviction_policy="evict_first")
            scale_next = tl.load(scales + own_next + rows, mine_factor + 1 < left, 0.0)
            if ZEROS:
                middle_next = tl.load(zeros + own_next + rows, mine_factor + 1 < left, 0.0)
        _finish(y, bias, tl.sum(total, 0), tile, m, n, GATED, BIAS, BLOCK_M, BLOCK_N)


def multiply_resident(
    x: torch.Tensor, weight: Integers, bias: torch.Tensor | None, y: torch.Tensor, gated: int, tile: ResidentTile
) -> None:
    """Write the product of ``x [m, k]``, of 16 bits, and a weight with the words of ``with_words`` to ``y [m, n]``, or its gate to
    ``y [m, n / 2]``. With a tile that divides the columns, write the parts of the product to ``y [split, m, n]``."""
    m, n, k = len(x), len(weight.codes), weight.columns
    tiles = triton.cdiv(n, tile.block_n)
    launch(
        resident_rows, (min(tiles, max(1, tile.per_sm * processors(x.device) // tile.split)), tile.split),
        x, weight.codes.view(torch.int16), weight.scales, weight.zeros, bias, y, m, n, k, k // tile.split, weight.group, tiles,
        ZEROS=weight.zeros is not None, GATED=gated, BIAS=bias is not None, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        WARPS=tile.warps, BLOCKS=tile.blocks, num_warps=tile.warps, num_stages=1,
    )  # fmt: skip
