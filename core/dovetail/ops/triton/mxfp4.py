"""Compute layers of experts whose weights are MXFP4 codes, on CUDA. ``ExpertWeights`` describes the format.

The order of the work is that of ``experts``: pairs of a token and an expert are sorted by expert, programs multiply blocks of
pairs of one expert with tiles of its weight, and results of pairs are written by token and added up in order. One token
needs no sorting: each of its experts is a block.

The weight is the left operand of every product: its tiles are dequantized in registers, where tensor cores read left
operands, and never written to shared memory. Two products take the low and the high bits of the same bytes, with the
columns of ``x`` that belong to each. An E2M1 number has the sign, the exponent and the mantissa in the order of a wider
floating-point number; shifted to the end of its exponent, it is a number that is too small by a power of two (the number 0.5
is subnormal in both). Multiplication by the scale of its block, which is a power of two too, makes up for that, as far as
the range of ``x.dtype`` allows; the sum is multiplied by the rest. Nothing is rounded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.interfaces.expert_shapes import ExpertWeights, Routing
from dovetail.ops.triton.experts import activate, pairs_of_block
from dovetail.ops.triton.launch import INTERPRETED, launch
from dovetail.ops.triton.mxfp4_tiles import tiles_of
from dovetail.ops.triton.routing import sort_by_expert

_HALF = tl.constexpr(16)
"""Half of the columns of a block that has one scale."""


def _place_pair(result: str, pair: str, at: int, mantissa: int) -> str:
    """Return assembly that makes two 16-bit numbers of the codes at bits ``at`` of both halves of the register
    ``pair``. ``mantissa`` is the bit of the wider number's mantissa that stands for a half."""
    shift, mask = mantissa - at, 7 << mantissa
    if mantissa + 4 <= 12:  # one multiplication shifts a code to both places, which do not overlap
        return f"""
        and.b32 t, {pair}, {(15 << at) * 0x10001:#x};
        mul.lo.u32 t, t, {1 << shift | 1 << 12 - at:#x};
        and.b32 {result}, t, {(0x8000 | mask) * 0x10001:#x};"""
    return f"""
        shl.b32 t, {pair}, {shift};
        and.b32 t, t, {mask * 0x10001:#x};
        shl.b32 q, {pair}, {12 - at};
        lop3.b32 {result}, q, 0x80008000, t, 0xEA;"""


def _assembly(at: int, mantissa: int) -> tl.constexpr:
    """Return assembly that makes four 16-bit numbers of the codes at bits ``at`` of four bytes."""
    return tl.constexpr(f"""{{
        .reg .b32 u, v, t, q;
        prmt.b32 u, $2, 0, 0x4140;
        prmt.b32 v, $2, 0, 0x4342;
        {_place_pair("$0", "u", at, mantissa)}
        {_place_pair("$1", "v", at, mantissa)}
        }}""")


_LOW_BF16, _HIGH_BF16 = _assembly(0, 6), _assembly(4, 6)
_LOW_FP16, _HIGH_FP16 = _assembly(0, 9), _assembly(4, 9)


@triton.jit
def _factors(scales, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, HALF_K: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return the second argument of ``_dequantized`` for ``scales [HALF_K / 16, BLOCK_N]``."""
    if ASSEMBLY and DTYPE.is_bf16():
        factor = ((scales.to(tl.uint16) + 63) << 7).to(tl.bfloat16, bitcast=True)
    elif ASSEMBLY:
        factor = ((scales.to(tl.uint32) + 14) << 23).to(tl.float32, bitcast=True).to(tl.float16)
    else:
        added: tl.constexpr = 126 if DTYPE.is_fp16() else 63
        factor = ((scales.to(tl.uint32) + added) << 23).to(tl.float32, bitcast=True)
    whole = tl.broadcast_to(tl.trans(factor)[:, :, None], [BLOCK_N, HALF_K // _HALF, _HALF])
    return tl.reshape(whole, [BLOCK_N, HALF_K])


@triton.jit
def _dequantized(codes, factors, HIGH: tl.constexpr, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return the weights in the low or high bits of ``codes``, times 2 ** -63 unless DTYPE is float16. With ASSEMBLY two
    codes are shifted at once, to 16-bit numbers, otherwise one to a float32 number."""
    if ASSEMBLY:
        # a branch for each type: the assembly's dtype may not be a parameter
        if DTYPE.is_bf16():
            text: tl.constexpr = _HIGH_BF16 if HIGH else _LOW_BF16
            numbers = tl.inline_asm_elementwise(text, "=&r,=&r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
        else:
            text: tl.constexpr = _HIGH_FP16 if HIGH else _LOW_FP16
            numbers = tl.inline_asm_elementwise(text, "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    else:
        code = codes.to(tl.uint32) >> (4 if HIGH else 0)
        numbers = (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True)
    return (numbers * factors).to(DTYPE)


@triton.jit
def _rest(total, DTYPE: tl.constexpr):
    """Return sums of products with what ``_dequantized`` returns as sums of products with weights."""
    if DTYPE.is_fp16():
        return total
    return total * 9223372036854775808.0


@triton.jit
def _add_product(
    total, codes, scales, low, high,
    DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, HALF_K: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Return ``total [BLOCK_N, BLOCK_M]`` plus the products of the weight and the columns of ``x`` that its low and high
    bits belong to, ``[BLOCK_M, HALF_K]`` each."""
    factors = _factors(scales, DTYPE, BLOCK_N, HALF_K, ASSEMBLY)
    left = _dequantized(codes, factors, False, DTYPE, ASSEMBLY)
    total = tl.dot(left, tl.trans(low), total, input_precision="ieee")
    left = _dequantized(codes, factors, True, DTYPE, ASSEMBLY)
    return tl.dot(left, tl.trans(high), total, input_precision="ieee")


@triton.jit
def store_gated(
    out, total, bias, of_expert, weights, row, present, pair, tile, size, alpha, limit, offset,
    SCALED: tl.constexpr, BIAS: tl.constexpr, LIMITED: tl.constexpr, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """Write the activation of ``total``, ``COLUMNS`` rows of gate and as many of up."""
    gate, up = tl.split(tl.permute(tl.reshape(total, [2, COLUMNS, BLOCK_M]), (2, 1, 0)))
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    if SCALED:
        factor = tl.load(weights + pair, present, 0.0)[:, None]
        gate, up = gate * factor, up * factor
    if BIAS:
        gate += tl.load(bias + of_expert + column, inside, 0.0).to(tl.float32)[None, :]
        up += tl.load(bias + of_expert + size + column, inside, 0.0).to(tl.float32)[None, :]
    result = activate(gate, up, alpha, limit, offset, LIMITED).to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64)[:, None] * size + column[None, :], result, present[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["tiles", "tokens", "first"])
def _product(
    x, w, scale, bias, out, weights, order, blocks, used, tiles, tokens, first, experts, half, width, alpha, limit, offset,
    GATED: tl.constexpr, TOP_K: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, LIMITED: tl.constexpr,
    IN_PARTS: tl.constexpr, ONE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, ASSEMBLY: tl.constexpr, PDL: tl.constexpr,
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
    # the rows of a tile: if GATED, those of gate, then those of up
    columns: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    local = tl.arange(0, BLOCK_N)
    column = tile * columns + local % columns
    inside = column < width
    wide = 2 * width if GATED else width
    held = tl.minimum(column, width - 1) + local // columns * width
    half_k: tl.constexpr = BLOCK_K // 2
    at, group = tl.arange(0, half_k), tl.arange(0, half_k // _HALF)
    source = pair // TOP_K if GATED else row
    rows = x + source.to(tl.int64)[:, None] * (2 * half) + (at + at // _HALF * _HALF)[None, :]
    stored = w + expert * wide * half + held[:, None] * half + at[None, :]
    scales = scale + expert * wide * (half // _HALF) + group[:, None] * wide
    scales += (column + local // columns * width)[None, :]
    dtype: tl.constexpr = x.dtype.element_ty
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, half, half_k):
        if EVEN:
            codes = tl.load(stored + start)
            low = tl.load(rows + 2 * start, present[:, None], 0.0)
            high = tl.load(rows + 2 * start + _HALF, present[:, None], 0.0)
            own_scales = tl.load(scales + start // _HALF * wide, inside[None, :], 0)
        else:
            more = (start + at < half)[None, :]
            codes = tl.load(stored + start, more, 0)
            low = tl.load(rows + 2 * start, present[:, None] & more, 0.0)
            high = tl.load(rows + 2 * start + _HALF, present[:, None] & more, 0.0)
            more_scales = (group + start // _HALF < half // _HALF)[:, None] & inside[None, :]
            own_scales = tl.load(scales + start // _HALF * wide, more_scales, 0)
        total = _add_product(total, codes, own_scales, low, high, dtype, BLOCK_N, half_k, ASSEMBLY)
    total = _rest(total, dtype)
    if GATED:
        store_gated(
            out, total, bias, expert * wide, weights, row, present, pair, tile, width, alpha, limit, offset,
            SCALED, BIAS, LIMITED, BLOCK_M, columns,
        )  # fmt: skip
    else:
        place = (pair % TOP_K).to(tl.int64) * tokens + pair // TOP_K if IN_PARTS else pair.to(tl.int64)
        total = tl.trans(total)
        if BIAS:
            total += tl.load(bias + expert * width + column, inside, 0.0).to(tl.float32)[None, :]
        if not SCALED:
            total *= tl.load(weights + pair, present, 0.0)[:, None]
        result = total.to(out.dtype.element_ty)
        tl.store(out + place[:, None] * width + column[None, :], result, present[:, None] & inside[None, :])


def pair_results(x: torch.Tensor, routing: Routing, weights: ExpertWeights, *, in_parts: bool) -> torch.Tensor:
    """Compute ``ops.triton.experts.pair_results``, also of one token."""
    (tokens, hidden), top_k = x.shape, routing.ids.shape[1]
    count, _, half = weights.down.shape
    size, one = 2 * half, tokens == 1
    tiles = tiles_of(tokens, count, top_k, hidden, size, count / weights.whole, x.element_size())
    if one:
        order, blocks = (routing.ids, routing.ids, routing.ids), top_k
    else:
        found = sort_by_expert(routing.ids, weights.first, count, tiles.block_m)
        order, blocks = found[:3], len(found.blocks)
    inner = torch.empty(tokens * top_k, size, dtype=x.dtype, device=x.device)
    shape = (top_k, tokens, hidden) if in_parts else (tokens, top_k, hidden)
    results = torch.empty(shape, dtype=torch.float32 if in_parts else x.dtype, device=x.device)
    activation = weights.activation
    for gated, given, w, scale, bias, out, tile in (
        (True, x, weights.gate_up, weights.gate_up_scale, weights.gate_up_bias, inner, tiles.gate_up),
        (False, inner, weights.down, weights.down_scale, weights.down_bias, results, tiles.down),
    ):
        columns, width = given.shape[1], out.shape[-1]
        programs = triton.cdiv(width, tile.block_n // 2 if gated else tile.block_n)
        launch(
            _product, (blocks * programs,),
            given, w, scale, bias, out, routing.weights, *order, programs, tokens, weights.first, count, columns // 2,
            width, activation.alpha, activation.limit or 0.0, activation.offset,
            GATED=gated, TOP_K=top_k, SCALED=weights.scaled_input, BIAS=bias is not None,
            LIMITED=activation.limit is not None, IN_PARTS=in_parts, ONE=one,
            BLOCK_M=tiles.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, EVEN=columns % tile.block_k == 0,
            ASSEMBLY=not INTERPRETED and x.element_size() == 2, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return results
