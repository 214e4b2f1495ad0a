"""Multiply with weights that are integers of 4 or 8 bits (``ops.integers``), and compute layers of experts that have them, on
CUDA.

Integers are exact in 16 bits: tensor cores multiply them, and the sums of a block of columns that has one scale are multiplied
by it. The order of the work for experts, and the order of operands, is that of ``mxfp4``. Codes of 4 bits in planes take three
instructions for two numbers, which is what bounds products of few rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.interfaces.expert_shapes import ExpertWeights, Routing
from dovetail.ops.integers import PLANES
from dovetail.ops.triton.adapted_pairs import PairAdapters, blocks_of_pairs
from dovetail.ops.triton.expert_pairs import pairs_of_block, rows_of_tile, store_down, store_gated
from dovetail.ops.triton.launch import INTERPRETED, launch
from dovetail.ops.triton.mxfp4_tiles import Mxfp4Tile, tiles_of
from dovetail.ops.triton.sizes import cdiv

HALF = tl.constexpr(16)
"""The columns of a block whose codes are in the low bits, and in the high bits, of 16 bytes."""
PLANE = tl.constexpr(PLANES // 4)
"""The columns of a plane: those that the same bits of adjacent words of 16 bits are."""
_PLAIN = tl.constexpr(INTERPRETED)  # the interpreter has no numbers of 16 bits by their bits, and no assembly


@triton.jit
def from_four_bits(codes, zeros, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    """Return the integers in the low or high bits of ``codes``, less ``zeros`` (0 to 15, broadcast)."""
    number = (codes >> 4) if HIGH else (codes & 15)
    if _PLAIN or DTYPE.is_fp32():
        found = (number.to(tl.float32) - zeros.to(tl.float32)).to(DTYPE)
    elif DTYPE.is_bf16():  # the bits of 128 + number
        wide = (number.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
        found = wide - (zeros.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
    else:  # the bits of 1024 + number
        wide = (number.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
        found = wide - (zeros.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
    return found


@triton.jit
def from_eight_bits(codes, zeros, DTYPE: tl.constexpr):
    """Return the integers of ``codes`` (-128 to 127), less ``zeros`` (0 to 255, which stand for -128 to 127)."""
    return (codes.to(tl.float32) - (zeros.to(tl.float32) - 128.0)).to(DTYPE)


@triton.jit
def integer_sums(codes, zeros, tokens, present, FOUR: tl.constexpr, DTYPE: tl.constexpr):
    """Return the products of a tile of codes ``[BLOCK_N, bytes]`` and the columns of ``x`` at ``tokens``, without scales."""
    if FOUR:
        low = tl.load(tokens, present, 0.0)
        high = tl.load(tokens + HALF, present, 0.0)
        left = from_four_bits(codes, zeros, False, DTYPE)
        found = tl.dot(left, tl.trans(low), input_precision="ieee")
        left = from_four_bits(codes, zeros, True, DTYPE)
        found = tl.dot(left, tl.trans(high), found, input_precision="ieee")
    else:
        right = tl.trans(tl.load(tokens, present, 0.0))
        found = tl.dot(from_eight_bits(codes, zeros, DTYPE), right, input_precision="ieee")
    return found


@triton.jit
def of_groups(place, start, group, rows, GROUPS: tl.constexpr):
    """Return what the planes of the columns from ``start`` on have at ``place [groups, rows]``. GROUPS (1, 2 or 4) of them may
    differ: each ``4 / GROUPS`` planes are columns of one group."""
    first = tl.load(place + start // group * rows)
    second, third, fourth = first, first, first
    if GROUPS >= 2:
        third = tl.load(place + (start + 2 * PLANE) // group * rows)
        fourth = third
    if GROUPS == 4:
        second = tl.load(place + (start + PLANE) // group * rows)
        fourth = tl.load(place + (start + 3 * PLANE) // group * rows)
    return first, second, third, fourth


@triton.jit
def _plane(codes, middle, INDEX: tl.constexpr, DTYPE: tl.constexpr):
    return ((codes >> 4 * INDEX & 15).to(tl.float32) - middle.to(tl.float32)).to(DTYPE)


def _planes_plus(first: str) -> str:
    """Return instructions that write the numbers in the four planes of two words each, plus the number of 16 bits ``first`` (hexadecimal)."""
    middle = f"0x000F000F, 0x{first}{first}, 0xea;"
    others = [f"shr.b32 s, $4, {4 * plane}; lop3.b32 ${plane}, s, {middle}" for plane in (1, 2, 3)]
    return "\n".join(["{ .reg .b32 s;", f"lop3.b32 $0, $4, {middle}", *others, "}"])


PLANES_BFLOAT16, PLANES_FLOAT16 = tl.constexpr(_planes_plus("4300")), tl.constexpr(_planes_plus("6400"))
"""Instructions of sm_90 for numbers plus 128 in bfloat16, and plus 1024 in float16."""


@triton.jit
def _middles(middle, like, BITS: tl.constexpr):
    return tl.broadcast_to(middle.to(tl.int16) | BITS, like.shape)


@triton.jit
def planes_of(codes, m0, m1, m2, m3, DTYPE: tl.constexpr, APART: tl.constexpr):
    """Return the numbers in the four planes of ``codes`` (int16, of two dimensions), less their middles (broadcast). With APART
    they are plus 128 instead. The bits of a number become the last ones of 128 (bfloat16) or 1024 (float16)."""
    if _PLAIN or DTYPE.is_fp32():
        return (
            _plane(codes, m0, 0, DTYPE), _plane(codes, m1, 1, DTYPE), _plane(codes, m2, 2, DTYPE), _plane(codes, m3, 3, DTYPE)
        )  # fmt: skip
    elif APART:
        return tl.inline_asm_elementwise(
            PLANES_BFLOAT16, "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    elif DTYPE.is_bf16():
        return tl.inline_asm_elementwise(
            """{ .reg .b32 s, t;
            lop3.b32 t, $4, 0x000F000F, 0x43004300, 0xea; sub.rn.bf16x2 $0, t, $5;
            shr.b32 s, $4, 4;  lop3.b32 t, s, 0x000F000F, 0x43004300, 0xea; sub.rn.bf16x2 $1, t, $6;
            shr.b32 s, $4, 8;  lop3.b32 t, s, 0x000F000F, 0x43004300, 0xea; sub.rn.bf16x2 $2, t, $7;
            shr.b32 s, $4, 12; lop3.b32 t, s, 0x000F000F, 0x43004300, 0xea; sub.rn.bf16x2 $3, t, $8; }""",
            "=r,=r,=r,=r,r,r,r,r,r",
            [codes, _middles(m0, codes, 0x4300), _middles(m1, codes, 0x4300), _middles(m2, codes, 0x4300), _middles(m3, codes, 0x4300)],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 s, t;
            lop3.b32 t, $4, 0x000F000F, 0x64006400, 0xea; sub.rn.f16x2 $0, t, $5;
            shr.b32 s, $4, 4;  lop3.b32 t, s, 0x000F000F, 0x64006400, 0xea; sub.rn.f16x2 $1, t, $6;
            shr.b32 s, $4, 8;  lop3.b32 t, s, 0x000F000F, 0x64006400, 0xea; sub.rn.f16x2 $2, t, $7;
            shr.b32 s, $4, 12; lop3.b32 t, s, 0x000F000F, 0x64006400, 0xea; sub.rn.f16x2 $3, t, $8; }""",
            "=r,=r,=r,=r,r,r,r,r,r",
            [codes, _middles(m0, codes, 0x6400), _middles(m1, codes, 0x6400), _middles(m2, codes, 0x6400), _middles(m3, codes, 0x6400)],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def _scaled(sums, of_x, scale, middle, APART: tl.constexpr):
    if APART:
        sums -= of_x * (middle.to(tl.float32) + 128.0)[:, None]
    return sums * scale.to(tl.float32)[:, None]


@triton.jit
def plane_sums(
    codes, s0, s1, s2, s3, m0, m1, m2, m3, tokens, present, total,
    GROUPS: tl.constexpr, APART: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return ``total [BLOCK_N, BLOCK_M]`` plus the products of the planes of ``codes`` (int16 ``[BLOCK_N, PLANE]``), times their scales, and
    of the columns of ``x`` at ``tokens [PLANE, BLOCK_M]``. See ``of_groups`` for scales and middles. With APART (bfloat16 only), products of
    ``x`` and ones are multiplied by the middles: of few rows they take less time than subtracting the middle from each number."""
    apart: tl.constexpr = APART and not _PLAIN
    p0, p1, p2, p3 = planes_of(codes, m0[:, None], m1[:, None], m2[:, None], m3[:, None], DTYPE, apart)
    x0 = tl.load(tokens, present, 0.0)
    x1 = tl.load(tokens + PLANE, present, 0.0)
    x2 = tl.load(tokens + 2 * PLANE, present, 0.0)
    x3 = tl.load(tokens + 3 * PLANE, present, 0.0)
    nothing = tl.zeros(total.shape, tl.float32)
    of_x = nothing
    one = tl.full(codes.shape, 1.0, DTYPE)
    sums = tl.dot(p0, x0, input_precision="ieee")
    if apart:
        of_x = tl.dot(one, x0)
    if GROUPS == 4:
        total += _scaled(sums, of_x, s0, m0, apart)
        sums, of_x = nothing, nothing
    sums = tl.dot(p1, x1, sums, input_precision="ieee")
    if apart:
        of_x = tl.dot(one, x1, of_x)
    if GROUPS >= 2:
        total += _scaled(sums, of_x, s1, m1, apart)
        sums, of_x = nothing, nothing
    sums = tl.dot(p2, x2, sums, input_precision="ieee")
    if apart:
        of_x = tl.dot(one, x2, of_x)
    if GROUPS == 4:
        total += _scaled(sums, of_x, s2, m2, apart)
        sums, of_x = nothing, nothing
    sums = tl.dot(p3, x3, sums, input_precision="ieee")
    if apart:
        of_x = tl.dot(one, x3, of_x)
    return total + _scaled(sums, of_x, s3, m3, apart)


@triton.jit(do_not_specialize=["tiles", "tokens", "first"])
def _integer_product(
    x, w, scale, zero, added, bias, out, weights, order, blocks, used, tiles, tokens, first, experts, k, width, group,
    alpha, limit, offset,
    FOUR: tl.constexpr, GROUPS: tl.constexpr, ZEROS: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr, TOP_K: tl.constexpr,
    SCALED: tl.constexpr, BIAS: tl.constexpr, LIMITED: tl.constexpr, IN_PARTS: tl.constexpr, ONE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    tile, block = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if ONE:
        expert = (tl.load(blocks + block) - first).to(tl.int64)
        if (expert < 0) | (expert >= experts):
            return
        row = block + tl.arange(0, BLOCK_M)
        present = row == block
        pair = tl.where(present, row, 0)
    else:
        if block >= tl.load(used):
            return
        expert, row, pair, present = pairs_of_block(order, blocks, block, BLOCK_M)
    columns: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    column, inside, held = rows_of_tile(tile, width, columns, BLOCK_N)
    wide = 2 * width if GATED else width
    packed: tl.constexpr = (4 if GROUPS else 2) if FOUR else 1
    at = tl.arange(0, BLOCK_K // packed)
    source = (pair // TOP_K if GATED else row).to(tl.int64) * k
    stored = w + (expert * wide + held[:, None]) * (k // packed) + at[None, :]
    of_expert = expert * wide * (k // group) + held
    dtype: tl.constexpr = x.dtype.element_ty
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if GROUPS:
        tokens_at = x + source[None, :] + at[:, None]
        m0 = tl.full([BLOCK_N], 8, tl.uint8)
        m1, m2, m3 = m0, m0, m0
        for start in range(0, k, BLOCK_K):
            codes = tl.load(stored + start // packed)
            s0, s1, s2, s3 = of_groups(scale + of_expert, start, group, wide, GROUPS)
            if ZEROS:
                m0, m1, m2, m3 = of_groups(zero + of_expert, start, group, wide, GROUPS)
            total = plane_sums(
                codes, s0, s1, s2, s3, m0, m1, m2, m3, tokens_at + start, present[None, :], total, GROUPS, False, dtype
            )
    else:
        rows = x + source[:, None] + (at + at // HALF * HALF if FOUR else at)[None, :]
        for start in range(0, k, BLOCK_K):
            own = of_expert + start // group * wide
            codes = tl.load(stored + start // packed)
            middle = tl.load(zero + own)[:, None] if ZEROS else tl.full([BLOCK_N, 1], 8 if FOUR else 128, tl.uint8)
            found = integer_sums(codes, middle, rows + start, present[:, None], FOUR, dtype)
            total += found * tl.load(scale + own).to(tl.float32)[:, None]
    if GATED:
        store_gated(
            out, total, added, bias, expert, weights, row, present, pair, tile, width, alpha, limit, offset,
            ADDED, SCALED, BIAS, LIMITED, BLOCK_M, columns,
        )  # fmt: skip
    else:
        store_down(
            out, tl.trans(total), bias, expert, weights, present, pair, column, inside, tokens, width,
            TOP_K, SCALED, BIAS, IN_PARTS,
        )  # fmt: skip


def pair_results(
    x: torch.Tensor, routing: Routing, weights: ExpertWeights, *, in_parts: bool, adapters: PairAdapters | None = None
) -> torch.Tensor:
    """Compute ``ops.triton.experts.pair_results``, also of one token. Groups are multiples of 32 columns."""
    (tokens, hidden), top_k = x.shape, routing.ids.shape[1]
    four = weights.format == "int4"
    count, size, one = len(weights.down), weights.gate_up.shape[1] // 2, tokens == 1 and adapters is None
    tiles = tiles_of(tokens, count, top_k, hidden, size, count / weights.whole, x.element_size())
    order, blocks, adapted = blocks_of_pairs(routing, weights, tiles.block_m, adapters)
    added = None if adapted is None else adapted.gate_up(x)
    inner = torch.empty(tokens * top_k, size, dtype=x.dtype, device=x.device)
    shape = (top_k, tokens, hidden) if in_parts else (tokens, top_k, hidden)
    results = torch.empty(shape, dtype=torch.float32 if in_parts else x.dtype, device=x.device)
    activation = weights.activation
    for gated, given, w, scale, zero, bias, out, tile in (
        (True, x, weights.gate_up, weights.gate_up_scale, weights.gate_up_zero, weights.gate_up_bias, inner, tiles.gate_up),
        (False, inner, weights.down, weights.down_scale, weights.down_zero, weights.down_bias, results, tiles.down),
    ):  # fmt: skip
        assert scale is not None
        columns, width = given.shape[1], out.shape[-1]
        group = columns // scale.shape[1]
        groups = planes_with_groups(columns, group) if four else 0
        own = integer_expert_tile(tile, tiles.block_m, PLANES if groups else group)
        programs = cdiv(width, own.block_n // 2 if gated else own.block_n)
        launch(
            _integer_product, (blocks * programs,),
            given, w.view(torch.int16) if groups else w, scale, zero, added if gated else None, bias, out, routing.weights, *order,
            programs, tokens, weights.first, count, columns, width, group, activation.alpha, activation.limit or 0.0, activation.offset,
            FOUR=four, GROUPS=groups, ZEROS=zero is not None, GATED=gated, ADDED=gated and added is not None, TOP_K=top_k,
            SCALED=weights.scaled_input, BIAS=bias is not None, LIMITED=activation.limit is not None, IN_PARTS=in_parts, ONE=one,
            BLOCK_M=tiles.block_m, BLOCK_N=own.block_n, BLOCK_K=own.block_k,
            num_warps=own.warps, num_stages=own.stages,
        )  # fmt: skip
    return results if adapted is None else adapted.add_down(results, inner)


def planes_with_groups(columns: int, group: int) -> int:
    """Return how many of the four planes of a block of 4-bit codes may have scales of their own (1, 2 or 4), or 0 if rows of this
    number of columns are not held in planes."""
    return 0 if columns % PLANES else PLANES // min(group & -group, PLANES)


def integer_expert_tile(tile: Mxfp4Tile, block_m: int, group: int) -> Mxfp4Tile:
    """Return a tile of as many rows as ``tile``, whose columns have one scale in each row. It has warps for two sums of each
    element: those of a block of columns, and those of all before."""
    warps = max(tile.warps, block_m * tile.block_n // 2048)
    return tile._replace(block_k=min(group & -group, 128), warps=warps, stages=min(tile.stages, 4))
