"""Compute layers of experts whose weights are packed blocks of GGUF (``ops.packed_blocks``), on CUDA.

The order of the work is that of ``mxfp4``: pairs of a token and an expert are sorted by expert, and programs multiply blocks of pairs of
one expert with tiles of its weight. The weight is the left operand of every product: its tiles are dequantized in registers, rounded to
the dtype of ``x``. The same bits of all words of a tile are the columns of one product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.interfaces.expert_shapes import ExpertWeights, Routing
from dovetail.ops.packed_blocks import PACKED, PackedType, PackedWeight
from dovetail.ops.triton.adapted_pairs import PairAdapters, blocks_of_pairs
from dovetail.ops.triton.expert_pairs import pairs_of_block, rows_of_tile, store_down, store_gated
from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.packed_numbers import code_number, factors_of, spread
from dovetail.ops.triton.sizes import cdiv


class PackedExpertTile(NamedTuple):
    """Describe a tile of a weight: ``block_n`` rows, for the activation half of them of gate and half of up."""

    block_n: int
    block_k: int
    warps: int
    stages: int


@triton.jit(do_not_specialize=["tiles", "tokens", "first"])
def _packed_product(
    x, w, scale, multiplier, offset, offset_multiplier, added, bias, out, weights, order, blocks, used, tiles, tokens, first,
    experts, k, width, words, alpha, limit, up_offset,
    BITS: tl.constexpr, STEP: tl.constexpr, ZERO: tl.constexpr, WHOLE: tl.constexpr, GROUP: tl.constexpr,
    OFFSET: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr, TOP_K: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr,
    LIMITED: tl.constexpr, IN_PARTS: tl.constexpr, ONE: tl.constexpr, EVEN: tl.constexpr,
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
    held += expert * wide
    each: tl.constexpr = 32 // BITS
    unit: tl.constexpr = STEP * each
    units: tl.constexpr = BLOCK_K // unit
    at = tl.arange(0, BLOCK_K // each)
    of_word = at // STEP * unit + at % STEP  # the column of the first code of each word
    stored = w + held[:, None] * words + at[None, :]
    source = (pair // TOP_K if GATED else row).to(tl.int64)
    rows = x + source[:, None] * k + of_word[None, :]
    dtype: tl.constexpr = x.dtype.element_ty
    middle: tl.constexpr = ZERO + (16 if BITS == 4 else 256)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, k, BLOCK_K):
        if EVEN:
            wanted = present[:, None]
            codes = tl.load(stored + start // each)
        else:
            more = (start + of_word < k)[None, :]
            wanted = present[:, None] & more
            codes = tl.load(stored + start // each, more, 0)
        factor = factors_of(scale, multiplier, held, words, start, k, unit, WHOLE, GROUP, BLOCK_K, BLOCK_K)
        less = factor * middle
        if OFFSET:
            less += factors_of(offset, offset_multiplier, held, words, start, k, unit, WHOLE, GROUP, BLOCK_K, BLOCK_K)
        factor = spread(factor, BLOCK_N, units, STEP)
        less = spread(less, BLOCK_N, units, STEP)
        for index in tl.static_range(each):
            left = (code_number(codes, index, BITS) * factor - less).to(dtype)
            right = tl.load(rows + start + index * STEP, wanted, 0.0)
            total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    if GATED:
        store_gated(
            out, total, added, bias, expert, weights, row, present, pair, tile, width, alpha, limit, up_offset,
            ADDED, SCALED, BIAS, LIMITED, BLOCK_M, columns,
        )  # fmt: skip
    else:
        store_down(
            out, tl.trans(total), bias, expert, weights, present, pair, column, inside, tokens, width,
            TOP_K, SCALED, BIAS, IN_PARTS,
        )  # fmt: skip


def block_of(tokens: int, experts: int, top_k: int, share: float) -> int:
    """Return the number of pairs of a block for a number of tokens. This rank has ``experts`` experts, which are ``share`` of
    all. Not measured yet."""
    pairs = tokens * top_k * share / experts
    return next((size for size in (16, 32) if pairs <= size), 64)


def tile_of(k: int, packing: PackedType) -> PackedExpertTile:
    """Return the tile of a weight of ``k`` columns. Not measured yet."""
    block_k = 256 if packing.bits == 4 else 128
    while block_k > packing.unit and block_k >= 2 * k:
        block_k //= 2
    return PackedExpertTile(64, block_k, 4, 3)


def pair_results(
    x: torch.Tensor, routing: Routing, weights: ExpertWeights, *, in_parts: bool, adapters: PairAdapters | None = None
) -> torch.Tensor:
    """Compute ``ops.triton.experts.pair_results``, also of one token."""
    (tokens, hidden), top_k = x.shape, routing.ids.shape[1]
    blocks_of = weights.blocks
    assert blocks_of is not None
    assert blocks_of.packed
    count, size, one = len(weights.down), weights.gate_up.shape[1] // 2, tokens == 1 and adapters is None
    block_m = block_of(tokens, count, top_k, count / weights.whole)
    order, blocks, adapted = blocks_of_pairs(routing, weights, block_m, adapters)
    added = None if adapted is None else adapted.gate_up(x)
    inner = torch.empty(tokens * top_k, size, dtype=x.dtype, device=x.device)
    shape = (top_k, tokens, hidden) if in_parts else (tokens, top_k, hidden)
    results = torch.empty(shape, dtype=torch.float32 if in_parts else x.dtype, device=x.device)
    activation = weights.activation
    for gated, given, stored, kind, bias, out in (
        (True, x, weights.gate_up, blocks_of.gate_up, weights.gate_up_bias, inner),
        (False, inner, weights.down, blocks_of.down, weights.down_bias, results),
    ):
        columns, width, packing = given.shape[1], out.shape[-1], PACKED[kind]
        weight = PackedWeight(stored.flatten(0, 1), packing, columns)
        sections = [weight.section(name) for name in ("codes", "scale", "multiplier", "offset", "offset_multiplier")]
        tile = tile_of(columns, packing)
        programs = cdiv(width, tile.block_n // 2 if gated else tile.block_n)
        launch(
            _packed_product, (blocks * programs,),
            given, *sections, added if gated else None, bias, out, routing.weights, *order, programs, tokens, weights.first, count, columns, width,
            weight.rows.stride(0) // 4, activation.alpha, activation.limit or 0.0, activation.offset,
            BITS=packing.bits, STEP=packing.step, ZERO=packing.zero, WHOLE=packing.whole, GROUP=packing.group or 0,
            OFFSET=packing.offset, GATED=gated, ADDED=gated and added is not None, TOP_K=top_k,
            SCALED=weights.scaled_input, BIAS=bias is not None,
            LIMITED=activation.limit is not None, IN_PARTS=in_parts, ONE=one, EVEN=columns % tile.block_k == 0,
            BLOCK_M=block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return results if adapted is None else adapted.add_down(results, inner)
