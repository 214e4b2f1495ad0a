"""Compute layers of experts with MXFP4 weights whose codes are held in planes, on CUDA.

The order of the work is that of ``mxfp4``. Of 32 columns, which have one scale, column j of eight is in word j of 16 bits, and so are
columns 8 + j, 16 + j and 24 + j: four planes. ``_POSITIONS`` has the bits of each. Two adjacent words are in one register, so that two
numbers of a plane become two numbers of 16 bits with one to four instructions (11 for all eight), and a multiplication by their scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.interfaces.expert_shapes import ExpertWeights, Routing
from dovetail.ops.triton.experts import pairs_of_block
from dovetail.ops.triton.launch import INTERPRETED, launch
from dovetail.ops.triton.mxfp4 import store_gated
from dovetail.ops.triton.mxfp4_tiles import Mxfp4Tiles, tiles_of
from dovetail.ops.triton.routing import sort_by_expert

_GROUP = tl.constexpr(32)
_WORDS = tl.constexpr(8)
"""The columns that have one scale, and the words that hold them."""
_POSITIONS = ((15, 6), (12, 3), (14, 0), (13, 9))
"""For each plane the bit of a word that is the sign, and the lowest of the three bits for exponent and mantissa."""


def in_planes(codes: torch.Tensor) -> torch.Tensor:
    """Return codes ``[..., in / 2]`` of ``ops.mxfp4`` in planes, uint8 of the same shape."""
    halves = codes.unflatten(-1, (-1, 16))
    numbers = torch.cat((halves & 15, halves >> 4), -1).unflatten(-1, (4, 8)).to(torch.int32)
    words = torch.zeros_like(numbers[..., 0, :])
    for plane, (sign, low) in enumerate(_POSITIONS):
        own = numbers[..., plane, :]
        words |= (own >> 3) << sign | (own & 7) << low
    return words.to(torch.uint16).view(torch.uint8).flatten(-2)


def _assembly(mantissa: int, kind: str) -> tl.constexpr:
    """Return assembly that makes two numbers of each plane of two words, times their scale. ``mantissa`` is the bit of the wider number's mantissa
    that stands for a half."""

    def shifted(target: str, by: int) -> str:
        return f"shl.b32 {target}, $4, {by};" if by > 0 else f"shr.b32 {target}, $4, {-by};"

    lines = list[str]()
    for plane, (sign, low) in enumerate(_POSITIONS):
        by, of_sign, mask = mantissa - low, 15 - sign, (7 << mantissa) * 0x10001
        if by == of_sign:
            source = "$4" if not by else "t"
            lines += ([shifted("t", by)] if by else []) + [f"and.b32 t, {source}, {mask | 0x80008000:#x};"]
        else:
            lines += ([shifted("t", by)] if by else []) + [f"and.b32 t, {'t' if by else '$4'}, {mask:#x};"]
            lines += ([shifted("q", of_sign)] if of_sign else []) + [
                f"lop3.b32 t, {'q' if of_sign else '$4'}, 0x80008000, t, 0xEA;"
            ]
        lines.append(f"mul.rn.{kind} ${plane}, t, $5;")
    return tl.constexpr("{ .reg .b32 t, q; " + "\n".join(lines) + " }")


_BF16, _FP16 = _assembly(6, "bf16x2"), _assembly(9, "f16x2")
_SIGN0, _SIGN1, _SIGN2, _SIGN3 = (tl.constexpr(sign) for sign, _ in _POSITIONS)
_LOW0, _LOW1, _LOW2, _LOW3 = (tl.constexpr(low) for _, low in _POSITIONS)


@triton.jit
def _plane(words, factors, SIGN: tl.constexpr, LOW: tl.constexpr, DTYPE: tl.constexpr):
    number = ((words >> SIGN & 1) << 31) | ((words >> LOW & 7) << 22)
    return (number.to(tl.float32, bitcast=True) * factors).to(DTYPE)


@triton.jit
def _factors(scales, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return what codes are multiplied by for ``scales [WIDTH / 8, BLOCK_N]``, see ``mxfp4``: ``[BLOCK_N, WIDTH]``."""
    if ASSEMBLY and DTYPE.is_bf16():
        factor = ((scales.to(tl.int16) + 63) << 7).to(tl.int16)
    elif ASSEMBLY:
        factor = (
            ((scales.to(tl.uint32) + 14) << 23).to(tl.float32, bitcast=True).to(tl.float16).to(tl.int16, bitcast=True)
        )
    else:
        added: tl.constexpr = 126 if DTYPE.is_fp16() else 63
        factor = ((scales.to(tl.uint32) + added) << 23).to(tl.float32, bitcast=True)
    return tl.reshape(
        tl.broadcast_to(tl.trans(factor)[:, :, None], [BLOCK_N, WIDTH // _WORDS, _WORDS]), [BLOCK_N, WIDTH]
    )


@triton.jit
def _planes_of(words, factors, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return the weights in the four planes of ``words`` (int16), times 2 ** -63 unless DTYPE is float16."""
    if ASSEMBLY:
        if DTYPE.is_bf16():
            return tl.inline_asm_elementwise(
                _BF16, "=&r,=&r,=&r,=&r,r,r", [words, factors],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                _FP16, "=&r,=&r,=&r,=&r,r,r", [words, factors],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
    else:
        wide = words.to(tl.uint32)
        return (
            _plane(wide, factors, _SIGN0, _LOW0, DTYPE), _plane(wide, factors, _SIGN1, _LOW1, DTYPE),
            _plane(wide, factors, _SIGN2, _LOW2, DTYPE), _plane(wide, factors, _SIGN3, _LOW3, DTYPE),
        )  # fmt: skip


@triton.jit(do_not_specialize=["tiles", "tokens", "first"])
def _product(
    x, w, scale, bias, out, weights, order, blocks, used, tiles, tokens, first, experts, k, width, alpha, limit, offset,
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
    words: tl.constexpr = BLOCK_K // 4
    at, group = tl.arange(0, words), tl.arange(0, words // _WORDS)
    source = pair // TOP_K if GATED else row
    rows = x + source.to(tl.int64)[:, None] * k + (at // _WORDS * _GROUP + at % _WORDS)[None, :]
    stored = w + expert * wide * (k // 4) + held[:, None] * (k // 4) + at[None, :]
    scales = scale + expert * wide * (k // _GROUP) + group[:, None] * wide
    scales += (column + local // columns * width)[None, :]
    dtype: tl.constexpr = x.dtype.element_ty
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, k, BLOCK_K):
        here = present[:, None]
        if EVEN:
            codes = tl.load(stored + start // 4)
            own_scales = tl.load(scales + start // _GROUP * wide, inside[None, :], 0)
        else:
            more = (at + start // 4 < k // 4)[None, :]
            here &= more
            codes = tl.load(stored + start // 4, more, 0)
            more_scales = (group + start // _GROUP < k // _GROUP)[:, None] & inside[None, :]
            own_scales = tl.load(scales + start // _GROUP * wide, more_scales, 0)
        x0 = tl.load(rows + start, here, 0.0)
        x1 = tl.load(rows + start + _WORDS, here, 0.0)
        x2 = tl.load(rows + start + 2 * _WORDS, here, 0.0)
        x3 = tl.load(rows + start + 3 * _WORDS, here, 0.0)
        factors = _factors(own_scales, dtype, BLOCK_N, words, ASSEMBLY)
        p0, p1, p2, p3 = _planes_of(codes, factors, dtype, ASSEMBLY)
        total = tl.dot(p0, tl.trans(x0), total, input_precision="ieee")
        total = tl.dot(p1, tl.trans(x1), total, input_precision="ieee")
        total = tl.dot(p2, tl.trans(x2), total, input_precision="ieee")
        total = tl.dot(p3, tl.trans(x3), total, input_precision="ieee")
    if not dtype.is_fp16():
        total *= 9223372036854775808.0  # see mxfp4
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


def pair_results(
    x: torch.Tensor, routing: Routing, weights: ExpertWeights, tiles: Mxfp4Tiles | None = None, *, in_parts: bool
) -> torch.Tensor:
    """Compute ``ops.triton.mxfp4.pair_results`` with codes in planes."""
    (tokens, hidden), top_k = x.shape, routing.ids.shape[1]
    count, _, half = weights.down.shape
    size, one = 2 * half, tokens == 1
    tiles = tiles or tiles_of(tokens, count, top_k, hidden, size, count / weights.whole, x.element_size())
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
            given, w.view(torch.int16), scale, bias, out, routing.weights, *order, programs, tokens, weights.first, count,
            columns, width, activation.alpha, activation.limit or 0.0, activation.offset,
            GATED=gated, TOP_K=top_k, SCALED=weights.scaled_input, BIAS=bias is not None,
            LIMITED=activation.limit is not None, IN_PARTS=in_parts, ONE=one,
            BLOCK_M=tiles.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, EVEN=columns % tile.block_k == 0,
            ASSEMBLY=not INTERPRETED and x.element_size() == 2, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return results
