"""Compute layers of experts on CUDA, without the host waiting for the choice of experts.

The pairs of a token and an expert are sorted by expert (``routing.sort_by_expert``), and programs multiply blocks of pairs
of one expert with tiles of its weight. Rows of ``x`` are read where they are, the activation is computed on the tiles, and
results of pairs are written by token, so that a last kernel, or the norm that follows (``ops.parts``), adds up each token's
experts in their order. No result depends on which program was first. With many pairs for each expert the products are those of
``experts_many``, if they fit the device and the layer. One token: see ``experts_one``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.interfaces.expert_shapes import ExpertWeights, Routing
from dovetail.ops.triton import experts_many
from dovetail.ops.triton.adapted_pairs import PairAdapters, adapted_pairs
from dovetail.ops.triton.expert_pairs import (
    NARROW,
    activate,
    pairs_of_block,
    scaled_and_biased,
    square_of_positive,
    store_down,
)
from dovetail.ops.triton.expert_tiles import ExpertTile, ExpertTiles, tiles_of
from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.routing import ExpertOrder, sort_by_expert
from dovetail.ops.triton.sizes import cdiv, next_power_of_2


@triton.jit
def _multiply(left, right, total, NARROW_ROWS: tl.constexpr):
    """Return ``total`` plus the product of rows ``left [m, k]`` and a tile of the weight ``right [n, k]``, which is
    ``[n, m]`` if NARROW_ROWS and ``[m, n]`` otherwise."""
    if NARROW_ROWS:
        total = tl.dot(right, tl.trans(left), total, input_precision="ieee")
    else:
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["tiles"])
def _gate_up(
    x, w, bias, added, out, factors, order, blocks, used, tiles, hidden, size, alpha, limit, offset,
    TOP_K: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, ADDED: tl.constexpr, LIMITED: tl.constexpr, UNGATED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    tile, block = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if block >= tl.load(used):
        return
    expert, row, pair, present = pairs_of_block(order, blocks, block, BLOCK_M)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < size
    at = tl.arange(0, BLOCK_K)
    rows = x + (pair // TOP_K).to(tl.int64)[:, None] * hidden + at[None, :]
    per_expert = size if UNGATED else 2 * size
    gates = w + (expert * per_expert + tl.minimum(column, size - 1))[:, None] * hidden + at[None, :]
    narrow: tl.constexpr = BLOCK_M <= NARROW
    high: tl.constexpr = BLOCK_N if narrow else BLOCK_M
    wide: tl.constexpr = BLOCK_M if narrow else BLOCK_N
    gate, up = tl.zeros([high, wide], tl.float32), tl.zeros([high, wide], tl.float32)
    for start in range(0, hidden, BLOCK_K):
        if EVEN:
            left = tl.load(rows + start, present[:, None], 0.0)
            right_gate = tl.load(gates + start)
            if not UNGATED:
                right_up = tl.load(gates + start + size * hidden)
        else:
            more = (start + at < hidden)[None, :]
            left = tl.load(rows + start, present[:, None] & more, 0.0)
            right_gate = tl.load(gates + start, more, 0.0)
            if not UNGATED:
                right_up = tl.load(gates + start + size * hidden, more, 0.0)
        gate = _multiply(left, right_gate, gate, narrow)
        if not UNGATED:
            up = _multiply(left, right_up, up, narrow)
    if narrow:
        gate, up = tl.trans(gate), tl.trans(up)
    if ADDED:
        own, real = added + row.to(tl.int64)[:, None] * per_expert + column[None, :], present[:, None] & inside[None, :]
        gate += tl.load(own, real, 0.0).to(tl.float32)
        if not UNGATED:
            up += tl.load(own + size, real, 0.0).to(tl.float32)
    gate, up = scaled_and_biased(gate, up, factors, bias, expert, pair, column, present, inside, size, SCALED, BIAS)
    if UNGATED:
        result = square_of_positive(gate).to(out.dtype.element_ty)
    else:
        result = activate(gate, up, alpha, limit, offset, LIMITED).to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64)[:, None] * size + column[None, :], result, present[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["tiles", "tokens"])
def _down(
    x, w, bias, out, factors, order, blocks, used, tiles, tokens, hidden, size,
    TOP_K: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, IN_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    tile, block = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if block >= tl.load(used):
        return
    expert, row, pair, present = pairs_of_block(order, blocks, block, BLOCK_M)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < hidden
    at = tl.arange(0, BLOCK_K)
    rows = x + row.to(tl.int64)[:, None] * size + at[None, :]
    source = w + (expert * hidden + tl.minimum(column, hidden - 1))[:, None] * size + at[None, :]
    narrow: tl.constexpr = BLOCK_M <= NARROW
    high: tl.constexpr = BLOCK_N if narrow else BLOCK_M
    wide: tl.constexpr = BLOCK_M if narrow else BLOCK_N
    total = tl.zeros([high, wide], tl.float32)
    for start in range(0, size, BLOCK_K):
        if EVEN:
            left = tl.load(rows + start, present[:, None], 0.0)
            right = tl.load(source + start)
        else:
            more = (start + at < size)[None, :]
            left = tl.load(rows + start, present[:, None] & more, 0.0)
            right = tl.load(source + start, more, 0.0)
        total = _multiply(left, right, total, narrow)
    if narrow:
        total = tl.trans(total)
    store_down(
        out, total, bias, expert, factors, present, pair, column, inside, tokens, hidden, TOP_K, SCALED, BIAS, IN_PARTS
    )


@triton.jit(do_not_specialize=["first"])
def _add_up(
    y, ids, shared, out, hidden, first, experts,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(TOP_K):
        expert = tl.load(ids + token * TOP_K + place) - first
        own = column < tl.where((expert >= 0) & (expert < experts), hidden, 0)
        total += tl.load(y + (token * TOP_K + place) * hidden + column, own, 0.0).to(tl.float32)
    if SHARED:
        total += tl.load(shared + token * hidden + column, inside, 0.0).to(tl.float32)
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), inside)


def add_up_pairs(
    results: torch.Tensor, routing: Routing, weights: ExpertWeights, shared: torch.Tensor | None
) -> torch.Tensor:
    """Return the sums of the ``results [tokens, top_k, hidden]`` of this rank's experts, plus ``shared`` if it is
    given."""
    tokens, top_k, hidden = results.shape
    block = min(1024, next_power_of_2(hidden))
    out = torch.empty(tokens, hidden, dtype=results.dtype, device=results.device)
    launch(
        _add_up, (tokens, cdiv(hidden, block)),
        results, routing.ids, shared, out, hidden, weights.first, len(weights.down),
        TOP_K=top_k, SHARED=shared is not None, BLOCK=block,
    )  # fmt: skip
    return out


def pair_results(
    x: torch.Tensor,
    routing: Routing,
    weights: ExpertWeights,
    tiles: ExpertTiles | None = None,
    *,
    in_parts: bool,
    adapters: PairAdapters | None = None,
) -> torch.Tensor:
    """Return the weighted results of pairs, ``[tokens, top_k, hidden]``, undefined for other ranks' experts, or if
    ``in_parts`` what ``expert_layers.expert_parts`` returns. With ``adapters``, which need results that are not in parts, the kernels are
    those for any number of tokens."""
    (tokens, hidden), top_k = x.shape, routing.ids.shape[1]
    count, size = len(weights.gate_up), weights.down.shape[2]
    fits = adapters is None and experts_many.fits(x, weights)
    tiles = tiles or tiles_of(tokens, count, top_k, hidden, size, count / weights.whole, x.element_size(), fits)
    order = sort_by_expert(routing.ids, weights.first, count, tiles.block_m)
    adapted = adapted_pairs(adapters, order, routing, weights)
    added = None if adapted is None else adapted.gate_up(x)
    inner = torch.empty(tokens * top_k, size, dtype=x.dtype, device=x.device)
    if tiles.gate_up.per_sm is None:
        launch_gate_up(x, inner, routing, weights, order, tiles.gate_up, added)
    else:
        experts_many.launch_gate_up(x, inner, routing, weights, order, tiles.gate_up)
    down = launch_down if tiles.down.per_sm is None else experts_many.launch_down
    results = down(inner, routing, weights, order, tiles.down, in_parts=in_parts)
    return results if adapted is None else adapted.add_down(results, inner)


def launch_down(
    inner: torch.Tensor,
    routing: Routing,
    weights: ExpertWeights,
    order: ExpertOrder,
    tile: ExpertTile,
    *,
    in_parts: bool,
) -> torch.Tensor:
    """Return what ``pair_results`` returns, from the activations of pairs ``inner [pairs, size]`` in ``order``."""
    (tokens, top_k), (hidden, size) = routing.ids.shape, weights.down.shape[1:]
    shape = (top_k, tokens, hidden) if in_parts else (tokens, top_k, hidden)
    results = torch.empty(shape, dtype=torch.float32 if in_parts else inner.dtype, device=inner.device)
    programs = cdiv(hidden, tile.block_n)
    launch(
        _down, (len(order.blocks) * programs,),
        inner, weights.down, weights.down_bias, results, routing.weights, *order[:3], programs, tokens, hidden, size,
        TOP_K=top_k, SCALED=weights.scaled_input, BIAS=weights.down_bias is not None, IN_PARTS=in_parts,
        BLOCK_M=order.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, EVEN=size % tile.block_k == 0,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return results


def launch_gate_up(
    x: torch.Tensor,
    inner: torch.Tensor,
    routing: Routing,
    weights: ExpertWeights,
    order: ExpertOrder,
    tile: ExpertTile,
    added: torch.Tensor | None = None,
) -> None:
    """Write the activations of pairs in ``order`` to ``inner [pairs, size]``. ``added [pairs, rows of an expert]`` is added to the
    products of gate and up."""
    hidden, size = x.shape[1], inner.shape[1]
    programs, activation = cdiv(size, tile.block_n), weights.activation
    launch(
        _gate_up, (len(order.blocks) * programs,),
        x, weights.gate_up, weights.gate_up_bias, added, inner, routing.weights, *order[:3], programs, hidden, size,
        activation.alpha, activation.limit or 0.0, activation.offset,
        TOP_K=routing.ids.shape[1], SCALED=weights.scaled_input, BIAS=weights.gate_up_bias is not None,
        ADDED=added is not None, LIMITED=activation.limit is not None, UNGATED=weights.ungated,
        BLOCK_M=order.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        EVEN=hidden % tile.block_k == 0, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
