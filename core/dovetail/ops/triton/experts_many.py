"""Compute layers of experts for many tokens, on devices that copy tiles to shared memory by descriptors (TMA; compute
capability 9.0).

The order of the work and the results are those of ``experts``. A tile of the product with gate and up is one product: its right
operand has as many rows of gate as of up. One copy reads both, because gate and up of an expert are two slices of a tensor
``[2 * experts, size, hidden]``. The rows of ``x`` are gathered by pointers. The rows of pairs that ``down`` reads are contiguous
in the order by expert. There are ``span`` programs: each computes every ``span``-th tile, and fetches the next one while it writes
a result.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from dovetail.interfaces.expert_shapes import ExpertWeights, Routing
from dovetail.ops.triton.expert_pairs import activate, pairs_of_block, scaled_and_biased, store_down
from dovetail.ops.triton.expert_tiles import ExpertTile
from dovetail.ops.triton.launch import launch, processors
from dovetail.ops.triton.routing import ExpertOrder
from dovetail.ops.triton.sizes import cdiv


@triton.jit(do_not_specialize=["tiles", "span"])
def _gate_up(
    x, w, bias, out, factors, order, blocks, used, tiles, span, hidden, size, alpha, limit, offset,
    TOP_K: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, LIMITED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.arange(0, BLOCK_K)
    for index in tl.range(tl.program_id(0), tl.load(used) * tiles, span, flatten=True):
        tile, block = index % tiles, index // tiles
        expert, row, pair, present = pairs_of_block(order, blocks, block, BLOCK_M)
        rows = x + (pair // TOP_K).to(tl.int64)[:, None] * hidden + at[None, :]
        total = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)
        for start in range(0, hidden, BLOCK_K):
            if EVEN:  # noqa: SIM108 (a mask takes registers)
                left = tl.load(rows + start)  # pairs that are not present are pair 0
            else:
                left = tl.load(rows + start, (at + start < hidden)[None, :], 0.0)
            right = tl.reshape(w.load([expert.to(tl.int32) * 2, tile * BLOCK_N, start]), [2 * BLOCK_N, BLOCK_K])
            total = tl.dot(left, tl.trans(right), total)
        gate, up = tl.split(tl.permute(tl.reshape(total, [BLOCK_M, 2, BLOCK_N]), (0, 2, 1)))
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = column < size
        gate, up = scaled_and_biased(gate, up, factors, bias, expert, pair, column, present, inside, size, SCALED, BIAS)
        result = activate(gate, up, alpha, limit, offset, LIMITED).to(out.dtype.element_ty)
        tl.store(out + row.to(tl.int64)[:, None] * size + column[None, :], result, present[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["tiles", "span", "tokens"])
def _down(
    x, w, bias, out, factors, order, blocks, used, tiles, span, tokens, hidden, size,
    TOP_K: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, IN_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for index in tl.range(tl.program_id(0), tl.load(used) * tiles, span, flatten=True):
        tile, block = index % tiles, index // tiles
        expert = tl.load(blocks + block * 3)
        first = tl.load(blocks + block * 3 + 1)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, size, BLOCK_K):
            left = x.load([first, start])  # rows after the last pair are of other experts, and not stored
            right = tl.reshape(w.load([expert, tile * BLOCK_N, start]), [BLOCK_N, BLOCK_K])
            total = tl.dot(left, tl.trans(right), total)
        row = first + tl.arange(0, BLOCK_M)
        present = row < tl.load(blocks + block * 3 + 2)
        pair = tl.load(order + row, present, 0)
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = column < hidden
        of_expert = expert.to(tl.int64)
        store_down(
            out,
            total,
            bias,
            of_expert,
            factors,
            present,
            pair,
            column,
            inside,
            tokens,
            hidden,
            TOP_K,
            SCALED,
            BIAS,
            IN_PARTS,
        )


def fits(x: torch.Tensor, weights: ExpertWeights) -> bool:
    """Return True if the kernels here can compute a layer of plain weights, or of weights that are dequantized to the dtype of ``x``:
    on Hopper, where they were measured, in 16 bits, with a gate, and with rows that descriptors can address."""
    hidden, size = x.shape[1], weights.gate_up.shape[1] // 2
    return not weights.ungated and x.element_size() == 2 and not (hidden % 8 or size % 8) and _capable(x.device)


@functools.cache
def _capable(device: torch.device) -> bool:
    """Return True for devices of compute capability 9.0, and for the CPU, on which kernels are interpreted."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


def launch_gate_up(
    x: torch.Tensor, inner: torch.Tensor, routing: Routing, weights: ExpertWeights, order: ExpertOrder, tile: ExpertTile
) -> None:
    """Compute ``experts.launch_gate_up``."""
    hidden, size, activation = x.shape[1], inner.shape[1], weights.activation
    columns = cdiv(size, tile.block_n)
    grid = _grid(x.device, tile, len(order.blocks) * columns)
    slices = weights.gate_up.view(-1, size, hidden)
    launch(
        _gate_up, (grid,),
        x, TensorDescriptor.from_tensor(slices, [2, tile.block_n, tile.block_k]), weights.gate_up_bias, inner,
        routing.weights, *order[:3], columns, grid, hidden, size,
        activation.alpha, activation.limit or 0.0, activation.offset,
        TOP_K=routing.ids.shape[1], SCALED=weights.scaled_input, BIAS=weights.gate_up_bias is not None,
        LIMITED=activation.limit is not None,
        BLOCK_M=order.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, EVEN=hidden % tile.block_k == 0,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def launch_down(
    inner: torch.Tensor,
    routing: Routing,
    weights: ExpertWeights,
    order: ExpertOrder,
    tile: ExpertTile,
    *,
    in_parts: bool,
) -> torch.Tensor:
    """Compute ``experts.launch_down``."""
    (tokens, top_k), size, hidden = routing.ids.shape, inner.shape[1], weights.down.shape[1]
    shape = (top_k, tokens, hidden) if in_parts else (tokens, top_k, hidden)
    results = torch.empty(shape, dtype=torch.float32 if in_parts else inner.dtype, device=inner.device)
    columns = cdiv(hidden, tile.block_n)
    grid = _grid(inner.device, tile, len(order.blocks) * columns)
    launch(
        _down, (grid,),
        TensorDescriptor.from_tensor(inner, [order.block_m, tile.block_k]),
        TensorDescriptor.from_tensor(weights.down, [1, tile.block_n, tile.block_k]),
        weights.down_bias, results, routing.weights, *order[:3], columns, grid, tokens, hidden, size,
        TOP_K=top_k, SCALED=weights.scaled_input, BIAS=weights.down_bias is not None, IN_PARTS=in_parts,
        BLOCK_M=order.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return results


def _grid(device: torch.device, tile: ExpertTile, tiles: int) -> int:
    assert tile.per_sm is not None
    return min(tile.per_sm * processors(device), tiles)
