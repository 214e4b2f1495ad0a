"""Compute layers of experts whose weights are MXFP4 codes, on CUDA. ``ExpertWeights`` describes the format.

The order of the work is that of ``experts``: pairs of a token and an expert are sorted by expert, programs multiply blocks of
pairs of one expert with tiles of its weight, and results of pairs are written by token and added up in order. One token
needs no sorting: each of its experts is a block.

The weight is the left operand of every product: its tiles are dequantized in registers, where tensor cores read left
operands, and never written to shared memory. Two products take the low and the high bits of the same bytes, with the
columns of ``x`` that belong to each. ``mxfp4_numbers`` dequantizes; sums are multiplied by what it leaves out. More pairs of each
expert: see ``mxfp4_words``, and for many tokens ``mxfp4_plain``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.interfaces.expert_shapes import ExpertWeights, Routing
from dovetail.ops.triton import mxfp4_words
from dovetail.ops.triton.adapted_pairs import PairAdapters, blocks_of_pairs
from dovetail.ops.triton.expert_pairs import pairs_of_block, rows_of_tile, store_down, store_gated
from dovetail.ops.triton.launch import INTERPRETED, launch
from dovetail.ops.triton.mxfp4_numbers import HALF, dequantized_codes, scale_factors, unscaled
from dovetail.ops.triton.mxfp4_tiles import tiles_of
from dovetail.ops.triton.sizes import cdiv


@triton.jit
def _add_product(
    total, codes, scales, low, high,
    DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, HALF_K: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Return ``total [BLOCK_N, BLOCK_M]`` plus the products of the weight and the columns of ``x`` that its low and high
    bits belong to, ``[BLOCK_M, HALF_K]`` each."""
    factors = scale_factors(scales, DTYPE, BLOCK_N, HALF_K, ASSEMBLY)
    left = dequantized_codes(codes, factors, False, DTYPE, ASSEMBLY)
    total = tl.dot(left, tl.trans(low), total, input_precision="ieee")
    left = dequantized_codes(codes, factors, True, DTYPE, ASSEMBLY)
    return tl.dot(left, tl.trans(high), total, input_precision="ieee")


@triton.jit(do_not_specialize=["tiles", "tokens", "first"])
def _product(
    x, w, scale, added, bias, out, weights, order, blocks, used, tiles, tokens, first, experts, half, width, alpha, limit, offset,
    GATED: tl.constexpr, ADDED: tl.constexpr, TOP_K: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, LIMITED: tl.constexpr,
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
    columns: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    column, inside, held = rows_of_tile(tile, width, columns, BLOCK_N)
    wide = 2 * width if GATED else width
    half_k: tl.constexpr = BLOCK_K // 2
    at, group = tl.arange(0, half_k), tl.arange(0, half_k // HALF)
    source = pair // TOP_K if GATED else row
    rows = x + source.to(tl.int64)[:, None] * (2 * half) + (at + at // HALF * HALF)[None, :]
    stored = w + expert * wide * half + held[:, None] * half + at[None, :]
    scales = scale + expert * wide * (half // HALF) + group[:, None] * wide
    scales += (column + tl.arange(0, BLOCK_N) // columns * width)[None, :]
    dtype: tl.constexpr = x.dtype.element_ty
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, half, half_k):
        if EVEN:
            codes = tl.load(stored + start)
            low = tl.load(rows + 2 * start, present[:, None], 0.0)
            high = tl.load(rows + 2 * start + HALF, present[:, None], 0.0)
            own_scales = tl.load(scales + start // HALF * wide, inside[None, :], 0)
        else:
            more = (start + at < half)[None, :]
            codes = tl.load(stored + start, more, 0)
            low = tl.load(rows + 2 * start, present[:, None] & more, 0.0)
            high = tl.load(rows + 2 * start + HALF, present[:, None] & more, 0.0)
            more_scales = (group + start // HALF < half // HALF)[:, None] & inside[None, :]
            own_scales = tl.load(scales + start // HALF * wide, more_scales, 0)
        total = _add_product(total, codes, own_scales, low, high, dtype, BLOCK_N, half_k, ASSEMBLY)
    total = unscaled(total, dtype)
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
    """Compute ``ops.triton.experts.pair_results``, also of one token."""
    if adapters is None and mxfp4_words.pays(x, routing.ids.shape[1], weights):
        return mxfp4_words.pair_results(x, routing, weights, in_parts=in_parts)
    (tokens, hidden), top_k = x.shape, routing.ids.shape[1]
    count, _, half = weights.down.shape
    size, one = 2 * half, tokens == 1 and adapters is None
    tiles = tiles_of(tokens, count, top_k, hidden, size, count / weights.whole, x.element_size())
    order, blocks, adapted = blocks_of_pairs(routing, weights, tiles.block_m, adapters)
    added = None if adapted is None else adapted.gate_up(x)
    inner = torch.empty(tokens * top_k, size, dtype=x.dtype, device=x.device)
    shape = (top_k, tokens, hidden) if in_parts else (tokens, top_k, hidden)
    results = torch.empty(shape, dtype=torch.float32 if in_parts else x.dtype, device=x.device)
    activation = weights.activation
    for gated, given, w, scale, bias, out, tile in (
        (True, x, weights.gate_up, weights.gate_up_scale, weights.gate_up_bias, inner, tiles.gate_up),
        (False, inner, weights.down, weights.down_scale, weights.down_bias, results, tiles.down),
    ):
        columns, width = given.shape[1], out.shape[-1]
        programs = cdiv(width, tile.block_n // 2 if gated else tile.block_n)
        launch(
            _product, (blocks * programs,),
            given, w, scale, added if gated else None, bias, out, routing.weights, *order, programs, tokens, weights.first, count, columns // 2,
            width, activation.alpha, activation.limit or 0.0, activation.offset,
            GATED=gated, ADDED=gated and added is not None, TOP_K=top_k, SCALED=weights.scaled_input, BIAS=bias is not None,
            LIMITED=activation.limit is not None, IN_PARTS=in_parts, ONE=one,
            BLOCK_M=tiles.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, EVEN=columns % tile.block_k == 0,
            ASSEMBLY=not INTERPRETED and x.element_size() == 2, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return results if adapted is None else adapted.add_down(results, inner)
