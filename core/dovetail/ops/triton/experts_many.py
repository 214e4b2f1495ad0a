"""Compute layers of experts for many tokens, on devices that copy tiles to shared memory by descriptors (TMA; compute
capability 9.0 and later).

The order of the work and the results are those of ``experts``. A tile of the product with gate and up is one product: its right
operand is as many rows of gate as of up, which one copy brings, since gate and up of an expert are two slices of a tensor
``[2 * experts, size, hidden]``. The rows of ``x`` are gathered by pointers. The rows of pairs that ``down`` reads are contiguous
in the order by expert. With ``span`` programs there may be fewer programs than tiles: each computes every ``span``-th tile, and
fetches the next one while it writes a result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from dovetail.interfaces.expert_shapes import ExpertWeights, Routing
from dovetail.ops.triton.experts import NARROW, activate, pairs_of_block, scaled_and_biased
from dovetail.ops.triton.launch import launch, processors
from dovetail.ops.triton.routing import ExpertOrder, sort_by_expert


class ManyTile(NamedTuple):
    """Describe a tile of a grouped product, see ``ExpertTile``; ``persistent`` is the number of programs for each multiprocessor, or 0
    for a program for each tile."""

    block_n: int
    block_k: int
    warps: int
    stages: int
    persistent: int = 0


class ManyTiles(NamedTuple):
    """Describe how a layer of experts is computed, see ``ExpertTiles``."""

    block_m: int
    gate_up: ManyTile
    down: ManyTile


@triton.jit(do_not_specialize=["tiles", "span"])
def _gate_up(
    x, w, bias, out, factors, order, blocks, used, tiles, span, hidden, size, alpha, limit, offset,
    TOP_K: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, LIMITED: tl.constexpr, FLAT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.arange(0, BLOCK_K)
    for index in tl.range(tl.program_id(0), tl.load(used) * tiles, span, flatten=FLAT):
        tile, block = index % tiles, index // tiles
        expert, row, pair, present = pairs_of_block(order, blocks, block, BLOCK_M)
        rows = x + (pair // TOP_K).to(tl.int64)[:, None] * hidden + at[None, :]
        narrow: tl.constexpr = BLOCK_M <= NARROW
        total = tl.zeros([2 * BLOCK_N, BLOCK_M] if narrow else [BLOCK_M, 2 * BLOCK_N], tl.float32)
        for start in range(0, hidden, BLOCK_K):
            if EVEN:  # noqa: SIM108 (a mask takes registers)
                left = tl.load(rows + start)  # pairs that are not present are pair 0
            else:
                left = tl.load(rows + start, (at + start < hidden)[None, :], 0.0)
            right = tl.reshape(w.load([expert.to(tl.int32) * 2, tile * BLOCK_N, start]), [2 * BLOCK_N, BLOCK_K])
            total = tl.dot(right, tl.trans(left), total) if narrow else tl.dot(left, tl.trans(right), total)
        if narrow:
            gate, up = tl.split(tl.permute(tl.reshape(total, [2, BLOCK_N, BLOCK_M]), (2, 1, 0)))
        else:
            gate, up = tl.split(tl.permute(tl.reshape(total, [BLOCK_M, 2, BLOCK_N]), (0, 2, 1)))
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = column < size
        gate, up = scaled_and_biased(gate, up, factors, bias, expert, pair, column, present, inside, size, SCALED, BIAS)
        result = activate(gate, up, alpha, limit, offset, LIMITED).to(out.dtype.element_ty)
        tl.store(out + row.to(tl.int64)[:, None] * size + column[None, :], result, present[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["tiles", "span", "tokens"])
def _down(
    x, w, bias, out, factors, order, blocks, used, tiles, span, tokens, hidden, size,
    TOP_K: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, IN_PARTS: tl.constexpr, FLAT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for index in tl.range(tl.program_id(0), tl.load(used) * tiles, span, flatten=FLAT):
        tile, block = index % tiles, index // tiles
        expert = tl.load(blocks + block * 3)
        first = tl.load(blocks + block * 3 + 1)
        narrow: tl.constexpr = BLOCK_M <= NARROW
        total = tl.zeros([BLOCK_N, BLOCK_M] if narrow else [BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, size, BLOCK_K):
            left = x.load([first, start])  # rows after the last pair are of other experts, and not stored
            right = tl.reshape(w.load([expert, tile * BLOCK_N, start]), [BLOCK_N, BLOCK_K])
            total = tl.dot(right, tl.trans(left), total) if narrow else tl.dot(left, tl.trans(right), total)
        if narrow:
            total = tl.trans(total)
        row = first + tl.arange(0, BLOCK_M)
        present = row < tl.load(blocks + block * 3 + 2)
        pair = tl.load(order + row, present, 0)
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = column < hidden
        if BIAS:
            total += tl.load(bias + expert.to(tl.int64) * hidden + column, inside, 0.0).to(tl.float32)[None, :]
        if not SCALED:
            total *= tl.load(factors + pair, present, 0.0)[:, None]
        result = total.to(out.dtype.element_ty)
        stored = present[:, None] & inside[None, :]
        place = (pair % TOP_K).to(tl.int64) * tokens + pair // TOP_K if IN_PARTS else pair.to(tl.int64)
        tl.store(out + place[:, None] * hidden + column[None, :], result, stored)


def fits(x: torch.Tensor, weights: ExpertWeights) -> bool:
    """Return whether the kernels here compute a layer: with weights of 16 bits of a gate and up, whose rows descriptors can address."""
    hidden, size = weights.down.shape[1:]
    capable = not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] == 9
    return (
        capable
        and weights.format == "plain"
        and not weights.ungated
        and x.element_size() == 2
        and not (hidden % 8 or size % 8)
    )


def pair_results(
    x: torch.Tensor, routing: Routing, weights: ExpertWeights, tiles: ManyTiles, *, in_parts: bool = False
) -> torch.Tensor:
    """Compute ``ops.triton.experts.pair_results``."""
    order = sort_by_expert(routing.ids, weights.first, len(weights.gate_up), tiles.block_m)
    inner = gate_up(x, routing, weights, order, tiles.gate_up)
    return down(inner, routing, weights, order, tiles.down, in_parts=in_parts)


def gate_up(
    x: torch.Tensor, routing: Routing, weights: ExpertWeights, order: ExpertOrder, tile: ManyTile
) -> torch.Tensor:
    """Return the activations of all pairs in ``order``, ``[pairs, size]``."""
    (tokens, hidden), top_k = x.shape, routing.ids.shape[1]
    size, activation = weights.down.shape[2], weights.activation
    inner = torch.empty(tokens * top_k, size, dtype=x.dtype, device=x.device)
    columns = triton.cdiv(size, tile.block_n)
    grid = _grid(x.device, tile, len(order.blocks) * columns)
    slices = weights.gate_up.view(-1, size, hidden)
    launch(
        _gate_up, (grid,),
        x, TensorDescriptor.from_tensor(slices, [2, tile.block_n, tile.block_k]), weights.gate_up_bias, inner,
        routing.weights, *order[:3], columns, grid, hidden, size,
        activation.alpha, activation.limit or 0.0, activation.offset,
        TOP_K=top_k, SCALED=weights.scaled_input, BIAS=weights.gate_up_bias is not None,
        LIMITED=activation.limit is not None, FLAT=tile.persistent > 0,
        BLOCK_M=order.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, EVEN=hidden % tile.block_k == 0,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return inner


def down(
    inner: torch.Tensor,
    routing: Routing,
    weights: ExpertWeights,
    order: ExpertOrder,
    tile: ManyTile,
    *,
    in_parts: bool = False,
) -> torch.Tensor:
    """Return the results of pairs from their activations, see ``ops.triton.experts.pair_results``."""
    (tokens, top_k), (hidden, size) = routing.ids.shape, weights.down.shape[1:]
    shape = (top_k, tokens, hidden) if in_parts else (tokens, top_k, hidden)
    results = torch.empty(shape, dtype=torch.float32 if in_parts else inner.dtype, device=inner.device)
    columns = triton.cdiv(hidden, tile.block_n)
    grid = _grid(inner.device, tile, len(order.blocks) * columns)
    launch(
        _down, (grid,),
        TensorDescriptor.from_tensor(inner, [order.block_m, tile.block_k]),
        TensorDescriptor.from_tensor(weights.down, [1, tile.block_n, tile.block_k]),
        weights.down_bias, results, routing.weights, *order[:3], columns, grid, tokens, hidden, size,
        TOP_K=top_k, SCALED=weights.scaled_input, BIAS=weights.down_bias is not None, IN_PARTS=in_parts,
        FLAT=tile.persistent > 0, BLOCK_M=order.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return results


def _grid(device: torch.device, tile: ManyTile, tiles: int) -> int:
    programs = tile.persistent * processors(device)
    return min(programs, tiles) if programs else tiles
