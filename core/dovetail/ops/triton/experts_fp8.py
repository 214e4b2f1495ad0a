"""Compute layers of experts whose weights are FP8 codes, on CUDA. ``ExpertWeights`` describes the formats.

The order of the work is that of ``experts``: pairs of a token and an expert are sorted by expert, programs multiply blocks of
pairs of one expert with tiles of its weight, and results of pairs are written by token and added up in order. One token
needs no sorting: each of its experts is a block.

Tensor cores multiply FP8 with FP8, so activations are quantized, with a scale for each ``GROUP`` columns of a row: the largest
magnitude divided by the largest FP8 number. Only the input of gate and up has one scale for the whole row if the weights
have scales by row. What is quantized does not depend on the number of tokens, where it is quantized does: the input of
gate and up by a kernel of its own, that of one token by each program; the input of ``down`` by the kernel of gate and up if
its tiles have ``GROUP`` columns, otherwise by each program of ``down``. Adapters of ``down`` read its input as it is, so that with
adapters a kernel of its own takes the place of the former. Sums of ``GROUP`` products are multiplied by both
scales and added up in float32. Only where a row has one scale, tensor cores add up all products; Hopper's keep about 14 bits
of a sum of FP8 products, far more than FP8 has.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.interfaces.expert_shapes import ExpertWeights, Routing
from dovetail.ops.triton.adapted_pairs import PairAdapters, blocks_of_pairs
from dovetail.ops.triton.expert_pairs import NARROW, activate, scaled_and_biased, store_down, with_added
from dovetail.ops.triton.expert_tiles import ExpertTiles
from dovetail.ops.triton.fp8 import divided, rounded, scale_of
from dovetail.ops.triton.fp8_tiles import tiles_of
from dovetail.ops.triton.launch import INTERPRETED, launch
from dovetail.ops.triton.sizes import cdiv, next_power_of_2

_GROUP = 128
"""The number of columns that share a scale of the input of ``down`` if the scales of weights are by row."""
_CODES = torch.float32 if INTERPRETED else torch.float8_e4m3fn
"""The dtype of quantized activations. Triton's interpreter rounds some numbers to FP8 wrongly, so that there the numbers are
rounded by arithmetic, and kept in float32."""


@triton.jit
def _quantized(rows, bound, ARITHMETIC: tl.constexpr):
    """Return float32 ``rows [m, k]`` as codes, and the scale of each row."""
    scale = scale_of(tl.max(tl.abs(rows), 1), bound)
    return rounded(divided(rows, scale[:, None]), ARITHMETIC), scale


@triton.jit
def _product(left, right, total, NARROW_ROWS: tl.constexpr, ARITHMETIC: tl.constexpr):
    """Return ``total`` plus the product of rows ``left [m, k]`` and a tile of the weight ``right [n, k]``, which is
    ``[n, m]`` if NARROW_ROWS and ``[m, n]`` otherwise."""
    if ARITHMETIC:
        right = right.to(tl.float32)
    if NARROW_ROWS:
        product = tl.dot(right, tl.trans(left), total, input_precision="ieee")
    else:
        product = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    return product


@triton.jit
def _scaled(product, of_rows, of_columns, NARROW_ROWS: tl.constexpr, ONE_SCALE: tl.constexpr):
    """Return ``product`` (see ``_product``) times the scales of rows ``[m]`` and of columns ``[n]``, or one scale of
    all columns."""
    if ONE_SCALE:
        of_rows *= of_columns
        factors = of_rows[None, :] if NARROW_ROWS else of_rows[:, None]
    else:
        factors = of_columns[:, None] * of_rows[None, :] if NARROW_ROWS else of_rows[:, None] * of_columns[None, :]
    return product * factors


@triton.jit
def _pairs_of(order, blocks, used, block, first, experts, ONE: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return whether a block has nothing to compute, its expert, the sorted places and the indices of its pairs, and which
    of them exist. For one token, a block is one of its experts, and all three arrays are ``routing.ids``."""
    if ONE:
        expert = tl.load(blocks + block) - first
        nothing = (expert < 0) | (expert >= experts)
        row = block + tl.arange(0, BLOCK_M)
        present = row == block
        pair = tl.where(present, row, 0)
    else:
        nothing = block >= tl.load(used)
        known = block < tl.load(used)
        expert = tl.load(blocks + block * 3, known, 0)
        row = tl.load(blocks + block * 3 + 1, known, 0) + tl.arange(0, BLOCK_M)
        present = row < tl.load(blocks + block * 3 + 2, known, 0)
        pair = tl.load(order + row, present, 0)
    return nothing, expert.to(tl.int64), row, pair, present


@triton.jit(do_not_specialize=["tiles", "first"])
def _gate_up(
    x, x_scale, w, w_scale, added, bias, out, out_scale, factors, order, blocks, used, tiles, first, experts, hidden, size,
    alpha, limit, offset, bound, block_rows,
    TOP_K: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, ADDED: tl.constexpr, LIMITED: tl.constexpr, ONE: tl.constexpr,
    BY_BLOCK: tl.constexpr, ONE_SCALE: tl.constexpr, CODED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, ARITHMETIC: tl.constexpr, DTYPE: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    tile, block = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    nothing, expert, row, pair, present = _pairs_of(order, blocks, used, block, first, experts, ONE, BLOCK_M)
    if nothing:
        return
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < size
    held = tl.minimum(column, size - 1)
    at, token, groups = tl.arange(0, GROUP), (pair // TOP_K).to(tl.int64), tl.cdiv(hidden, GROUP)
    rows = x + token[:, None] * hidden + at[None, :]
    gates = w + (expert * 2 * size + held)[:, None] * hidden + at[None, :]
    narrow: tl.constexpr = BLOCK_M <= NARROW
    high: tl.constexpr = BLOCK_N if narrow else BLOCK_M
    wide: tl.constexpr = BLOCK_M if narrow else BLOCK_N
    gate, up = tl.zeros([high, wide], tl.float32), tl.zeros([high, wide], tl.float32)
    if BY_BLOCK:
        block_row = tile * BLOCK_N // block_rows if ONE_SCALE else held // block_rows
        of_gate = w_scale + (expert * 2 * (size // block_rows) + block_row) * groups
        of_up = of_gate + size // block_rows * groups
    else:
        of_gate = w_scale + expert * 2 * size + held
        of_up = of_gate + size
        if ONE:
            largest = tl.zeros([GROUP], tl.float32)
            for start in range(0, hidden, GROUP):
                part = tl.load(x + start + at, start + at < hidden, 0.0).to(tl.float32)
                largest = tl.maximum(largest, tl.abs(part))
            of_x = tl.broadcast_to(scale_of(tl.max(largest, 0), bound), [BLOCK_M])
        else:
            of_x = tl.load(x_scale + token, present, 0.0)
    for step in range(groups):
        start, more = step * GROUP, step * GROUP + at < hidden
        if BY_BLOCK:  # before the products, which take longer than these loads
            gate_scale, up_scale = tl.load(of_gate + step), tl.load(of_up + step)
        if EVEN:
            right_gate, right_up = tl.load(gates + start), tl.load(gates + start + size * hidden)
        else:
            right_gate = tl.load(gates + start, more[None, :], 0.0)
            right_up = tl.load(gates + start + size * hidden, more[None, :], 0.0)
        if ONE:
            part = tl.load(x + start + at, more, 0.0).to(tl.float32)
            if BY_BLOCK:
                of_x = tl.broadcast_to(scale_of(tl.max(tl.abs(part), 0), bound), [BLOCK_M])
            quotients = divided(tl.where(present[:, None], part[None, :], 0.0), of_x[:, None])
            left = rounded(quotients, ARITHMETIC)
        else:
            if BY_BLOCK:
                of_x = tl.load(x_scale + token * groups + step, present, 0.0)
            left = tl.load(rows + start, present[:, None] & more[None, :], 0.0)
        if BY_BLOCK:
            gate_part = _product(left, right_gate, tl.zeros([high, wide], tl.float32), narrow, ARITHMETIC)
            up_part = _product(left, right_up, tl.zeros([high, wide], tl.float32), narrow, ARITHMETIC)
            gate += _scaled(gate_part, of_x, gate_scale, narrow, ONE_SCALE)
            up += _scaled(up_part, of_x, up_scale, narrow, ONE_SCALE)
        else:
            gate = _product(left, right_gate, gate, narrow, ARITHMETIC)
            up = _product(left, right_up, up, narrow, ARITHMETIC)
    if not BY_BLOCK:
        gate = _scaled(gate, of_x, tl.load(of_gate), narrow, False)
        up = _scaled(up, of_x, tl.load(of_up), narrow, False)
    if narrow:
        gate, up = tl.trans(gate), tl.trans(up)
    if ADDED:
        gate, up = with_added(gate, up, added, row, column, present, inside, size)
    gate, up = scaled_and_biased(gate, up, factors, bias, expert, pair, column, present, inside, size, SCALED, BIAS)
    result = activate(gate, up, alpha, limit, offset, LIMITED).to(DTYPE)
    stored = present[:, None] & inside[None, :]
    if CODED:
        result, scale = _quantized(tl.where(inside[None, :], result.to(tl.float32), 0.0), bound, ARITHMETIC)
        tl.store(out_scale + row.to(tl.int64) * tl.cdiv(size, GROUP) + tile, scale, present)
    tl.store(out + row.to(tl.int64)[:, None] * size + column[None, :], result, stored)


@triton.jit(do_not_specialize=["tiles", "tokens", "first"])
def _down(
    x, x_scale, w, w_scale, bias, out, factors, order, blocks, used, tiles, tokens, first, experts, hidden, size,
    bound, block_rows,
    TOP_K: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, IN_PARTS: tl.constexpr, ONE: tl.constexpr,
    BY_BLOCK: tl.constexpr, ONE_SCALE: tl.constexpr, CODED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, ARITHMETIC: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    tile, block = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    nothing, expert, row, pair, present = _pairs_of(order, blocks, used, block, first, experts, ONE, BLOCK_M)
    if nothing:
        return
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < hidden
    held = tl.minimum(column, hidden - 1)
    at, place, groups = tl.arange(0, GROUP), row.to(tl.int64), tl.cdiv(size, GROUP)
    rows = x + place[:, None] * size + at[None, :]
    source = w + (expert * hidden + held)[:, None] * size + at[None, :]
    narrow: tl.constexpr = BLOCK_M <= NARROW
    high: tl.constexpr = BLOCK_N if narrow else BLOCK_M
    wide: tl.constexpr = BLOCK_M if narrow else BLOCK_N
    total = tl.zeros([high, wide], tl.float32)
    if BY_BLOCK:
        block_row = tile * BLOCK_N // block_rows if ONE_SCALE else held // block_rows
        of_w = w_scale + (expert * tl.cdiv(hidden, block_rows) + block_row) * groups
    else:
        of_w = w_scale + expert * hidden + held
    for step in range(groups):
        start, more = step * GROUP, step * GROUP + at < size
        if BY_BLOCK:
            scale = tl.load(of_w + step)
        right = tl.load(source + start) if EVEN else tl.load(source + start, more[None, :], 0.0)
        left = tl.load(rows + start, present[:, None] & more[None, :], 0.0)
        if CODED:
            of_x = tl.load(x_scale + place * groups + step, present, 0.0)
        else:
            left, of_x = _quantized(left.to(tl.float32), bound, ARITHMETIC)
        part = _product(left, right, tl.zeros([high, wide], tl.float32), narrow, ARITHMETIC)
        if BY_BLOCK:
            total += _scaled(part, of_x, scale, narrow, ONE_SCALE)
        elif narrow:
            total += part * of_x[None, :]
        else:
            total += part * of_x[:, None]
    if narrow:
        total = tl.trans(total)
    if not BY_BLOCK:
        total *= tl.load(of_w)[None, :]
    store_down(
        out, total, bias, expert, factors, present, pair, column, inside, tokens, hidden, TOP_K, SCALED, BIAS, IN_PARTS
    )


@triton.jit
def _quantize_rows(
    x, out, scales, width, groups, bound,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, ARITHMETIC: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = at < width
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    codes, scale = _quantized(tl.load(x + token * width + at, inside, 0.0).to(tl.float32), bound, ARITHMETIC)
    tl.store(out + token * width + at, codes, inside)
    tl.store(scales + token * groups + group, scale, group < groups)


def quantize_rows(x: torch.Tensor, group: int | None, bound: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return contiguous ``x [tokens, width]`` as codes, and the scales float32 ``[tokens, groups]`` of each ``group``
    columns, or of the whole row. Magnitudes above ``bound`` count as it. Mutates nothing."""
    tokens, width = x.shape
    groups = 1 if group is None else cdiv(width, group)
    codes = torch.empty(x.shape, dtype=_CODES, device=x.device)
    scales = torch.empty(tokens, groups, dtype=torch.float32, device=x.device)
    size = next_power_of_2(width) if group is None else group
    several = min(next_power_of_2(groups), max(1, 4096 // size))
    launch(
        _quantize_rows, (tokens, cdiv(groups, several)), x, codes, scales, width, groups, bound,
        GROUPS=several, GROUP=size, ARITHMETIC=INTERPRETED, num_warps=8 if several * size > 2048 else 4,
    )  # fmt: skip
    return codes, scales


def pair_results(
    x: torch.Tensor, routing: Routing, weights: ExpertWeights, *, in_parts: bool, adapters: PairAdapters | None = None
) -> torch.Tensor:
    """Compute ``ops.triton.experts.pair_results``, also of one token."""
    (tokens, hidden), top_k = x.shape, routing.ids.shape[1]
    count, size, one = len(weights.gate_up), weights.down.shape[2], tokens == 1 and adapters is None
    by_block = weights.format == "fp8_blocks"
    group = weights.block[1] if by_block else _GROUP
    bound = math.inf if weights.input_bound is None else weights.input_bound
    tiles = tiles_of(1 if one else max(2, tokens), count, top_k, hidden, size, count / weights.whole, group, by_block)
    order, blocks, adapted = blocks_of_pairs(routing, weights, tiles.block_m, adapters)
    added = None if adapted is None else adapted.gate_up(x)
    inner, inner_scale = _gates(x, routing, weights, added, order, blocks, tiles, group, bound, one=one)
    given = inner
    if adapted is not None and tiles.gate_up.block_n == group:
        given, inner_scale = quantize_rows(inner, group, bound)
    shape = (top_k, tokens, hidden) if in_parts else (tokens, top_k, hidden)
    results = torch.empty(shape, dtype=torch.float32 if in_parts else x.dtype, device=x.device)
    programs = cdiv(hidden, tiles.down.block_n)
    launch(
        _down, (blocks * programs,),
        given, inner_scale, weights.down, weights.down_scale, weights.down_bias, results, routing.weights, *order,
        programs, tokens, weights.first, count, hidden, size, bound, weights.block[0],
        TOP_K=top_k, SCALED=weights.scaled_input, BIAS=weights.down_bias is not None, IN_PARTS=in_parts, ONE=one,
        BY_BLOCK=by_block, ONE_SCALE=weights.block[0] % tiles.down.block_n == 0, CODED=inner_scale is not None, BLOCK_M=tiles.block_m, BLOCK_N=tiles.down.block_n,
        GROUP=group, EVEN=size % group == 0, ARITHMETIC=INTERPRETED,
        num_warps=tiles.down.warps, num_stages=tiles.down.stages,
    )  # fmt: skip
    return results if adapted is None else adapted.add_down(results, inner)


def _gates(
    x: torch.Tensor,
    routing: Routing,
    weights: ExpertWeights,
    added: torch.Tensor | None,
    order: tuple[torch.Tensor, ...],
    blocks: int,
    tiles: ExpertTiles,
    group: int,
    bound: float,
    *,
    one: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the activations of all pairs, sorted, ``[pairs, size]``: in the dtype of ``x``, or codes and their scales
    ``[pairs, groups]``. With what adapters have ``added``, which need them as they are, they are not quantized."""
    hidden, pairs, size = x.shape[1], routing.ids.numel(), weights.down.shape[2]
    by_block, tile, activation = weights.format == "fp8_blocks", tiles.gate_up, weights.activation
    coded = tile.block_n == group and not one and added is None
    codes, scales = (x, None) if one else quantize_rows(x, group if by_block else None, bound)
    inner = torch.empty(pairs, size, dtype=_CODES if coded else x.dtype, device=x.device)
    inner_scale = torch.empty(pairs, cdiv(size, group), dtype=torch.float32, device=x.device) if coded else None
    programs = cdiv(size, tile.block_n)
    launch(
        _gate_up, (blocks * programs,),
        codes, scales, weights.gate_up, weights.gate_up_scale, added, weights.gate_up_bias, inner, inner_scale,
        routing.weights, *order, programs, weights.first, len(weights.gate_up), hidden, size,
        activation.alpha, activation.limit or 0.0, activation.offset, bound, weights.block[0],
        TOP_K=routing.ids.shape[1], SCALED=weights.scaled_input, BIAS=weights.gate_up_bias is not None,
        ADDED=added is not None, LIMITED=activation.limit is not None, ONE=one, BY_BLOCK=by_block,
        ONE_SCALE=weights.block[0] % tile.block_n == 0, CODED=coded,
        BLOCK_M=tiles.block_m, BLOCK_N=tile.block_n, GROUP=group, EVEN=hidden % group == 0, ARITHMETIC=INTERPRETED,
        DTYPE=_DTYPES[x.dtype], num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return inner, inner_scale


_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
