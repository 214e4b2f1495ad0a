"""Compute layers of experts for one token, on CUDA.

Each program multiplies some rows of one of the token's experts. The product with ``down`` adds up the experts, or leaves that
to the norm that follows (``ops.parts``). Nothing needs to be sorted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.interfaces.expert_shapes import ExpertWeights, Routing
from dovetail.ops.triton.expert_pairs import activate, square_of_positive
from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.sizes import cdiv, next_power_of_2


@triton.jit(do_not_specialize=["first"])
def _gate_up_one(
    x, w, bias, out, ids, factors, first, experts, hidden, size, alpha, limit, offset,
    SCALED: tl.constexpr, BIAS: tl.constexpr, LIMITED: tl.constexpr, UNGATED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Write the activations of some columns of one expert. With ``WHOLE``, rows have ``BLOCK_K`` numbers, which are loaded at once."""
    place = tl.program_id(1)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_K)
    if PDL:  # in this order: a leader, see ``launch``, so that ``_down_early`` may read the choice of experts early
        gdc_wait()
        gdc_launch_dependents()
    expert = (tl.load(ids + place) - first).to(tl.int64)
    if (expert < 0) | (expert >= experts):
        return
    per_expert = size if UNGATED else 2 * size
    source = w + (expert * per_expert + tl.minimum(column, size - 1))[:, None] * hidden + at[None, :]
    gates, ups = tl.zeros([BLOCK_N, BLOCK_K], tl.float32), tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    if WHOLE:
        gate_rows = tl.load(source, eviction_policy="evict_first").to(tl.float32)
        factor = tl.load(x + at).to(tl.float32)[None, :]
        if not UNGATED:
            ups = tl.load(source + size * hidden, eviction_policy="evict_first").to(tl.float32) * factor
        gates = gate_rows * factor
    else:
        for start in range(0, hidden, BLOCK_K):
            more = start + at < hidden
            factor = tl.load(x + start + at, more, 0.0).to(tl.float32)[None, :]
            gates += tl.load(source + start, more[None, :], 0.0, eviction_policy="evict_first").to(tl.float32) * factor
            if not UNGATED:
                up_rows = tl.load(source + start + size * hidden, more[None, :], 0.0, eviction_policy="evict_first")
                ups += up_rows.to(tl.float32) * factor
    gate, up = tl.sum(gates, 1), tl.sum(ups, 1)
    if SCALED:
        weight = tl.load(factors + place)
        gate, up = gate * weight, up * weight
    if BIAS:
        own = bias + expert * 2 * size + column
        gate += tl.load(own, column < size, 0.0).to(tl.float32)
        up += tl.load(own + size, column < size, 0.0).to(tl.float32)
    if UNGATED:
        result = square_of_positive(gate).to(out.dtype.element_ty)
    else:
        result = activate(gate, up, alpha, limit, offset, LIMITED).to(out.dtype.element_ty)
    tl.store(out + place * size + column, result, column < size)


@triton.jit(do_not_specialize=["first"])
def _down_one(
    x, w, bias, shared, out, ids, factors, first, experts, hidden, size,
    PLACES: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, SHARED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first_place = tl.program_id(1) * PLACES
    inside = column < hidden
    at = tl.arange(0, BLOCK_K)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    added = tl.zeros([BLOCK_N], tl.float32)
    for place in range(first_place, first_place + PLACES):
        expert = (tl.load(ids + place) - first).to(tl.int64)
        own = (expert >= 0) & (expert < experts)
        weight = 1.0
        if not SCALED:
            weight = tl.load(factors + place)
        expert = tl.where(own, expert, 0)
        source = w + (expert * hidden + tl.minimum(column, hidden - 1))[:, None] * size + at[None, :]
        for start in range(0, size, BLOCK_K):
            more = start + at < tl.where(own, size, 0)
            factor = tl.load(x + place * size + start + at, more, 0.0).to(tl.float32) * weight
            rows = tl.load(source + start, more[None, :], 0.0, eviction_policy="evict_first")
            total += rows.to(tl.float32) * factor[None, :]
        if BIAS:
            rows_bias = tl.load(bias + expert * hidden + column, column < tl.where(own, hidden, 0), 0.0)
            added += rows_bias.to(tl.float32) * weight
    if SHARED:
        added += tl.load(shared + column, inside, 0.0).to(tl.float32)
    result = (tl.sum(total, 1) + added).to(out.dtype.element_ty)
    tl.store(out + tl.program_id(1) * hidden + column, result, inside)


@triton.jit(do_not_specialize=["first"])
def _down_early(
    x, w, bias, out, ids, factors, first, experts, hidden, size,
    SCALED: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Write the result of one expert. A program fetches its rows of the weight, whole, before ``x`` is written: the kernel before
    this one is a leader."""
    place = tl.program_id(1)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at, inside = tl.arange(0, BLOCK_K), column < hidden
    if PDL:
        gdc_launch_dependents()
    expert = (tl.load(ids + place, cache_modifier=".cg") - first).to(tl.int64)
    own = (expert >= 0) & (expert < experts)
    expert = tl.where(own, expert, 0)
    source = w + (expert * hidden + tl.minimum(column, hidden - 1))[:, None] * size + at[None, :]
    rows = tl.load(source, (at < tl.where(own, size, 0))[None, :], 0.0, eviction_policy="evict_first")
    if PDL:
        gdc_wait()
    given = tl.load(x + place * size + at, at < size, 0.0).to(tl.float32)
    total = tl.sum(rows.to(tl.float32) * given[None, :], 1)
    if BIAS:
        total += tl.load(bias + expert * hidden + column, inside, 0.0).to(tl.float32)
    if not SCALED:
        total *= tl.load(factors + place)
    tl.store(out + place * hidden + column, total.to(out.dtype.element_ty), column < tl.where(own, hidden, 0))


@triton.jit
def _down_added(
    x, w, stream, out, ids, factors, hidden,
    SIZE: tl.constexpr, TOP_K: tl.constexpr, PIECE: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Add the results of all experts to one column of the residual stream. A program fetches its rows of the weight before
    ``x`` is written, up to three pieces of each to registers: the kernel before this one is a leader."""
    column = tl.program_id(0)
    at, place = tl.arange(0, PIECE), tl.arange(0, TOP_K)
    pieces: tl.constexpr = SIZE // PIECE
    if PDL:
        gdc_launch_dependents()
    expert = tl.load(ids + place, cache_modifier=".cg").to(tl.int64)
    rows = w + (expert * hidden + column)[:, None] * SIZE + at[None, :]
    first = tl.load(rows, eviction_policy="evict_first")
    if pieces > 1:
        second = tl.load(rows + PIECE, eviction_policy="evict_first")
    if pieces > 2:
        third = tl.load(rows + 2 * PIECE, eviction_policy="evict_first")
    if PDL:
        gdc_wait()
    given = x + place[:, None] * SIZE + at[None, :]
    total = first.to(tl.float32) * tl.load(given).to(tl.float32)
    if pieces > 1:
        total += second.to(tl.float32) * tl.load(given + PIECE).to(tl.float32)
    if pieces > 2:
        total += third.to(tl.float32) * tl.load(given + 2 * PIECE).to(tl.float32)
    for piece in tl.static_range(3, pieces):
        more = tl.load(rows + piece * PIECE, eviction_policy="evict_first")
        total += more.to(tl.float32) * tl.load(given + piece * PIECE).to(tl.float32)
    if not SCALED:
        total *= tl.load(factors + place)[:, None]
    added = tl.sum(tl.reshape(total, [TOP_K * PIECE]), 0).to(out.dtype.element_ty).to(tl.float32)
    added += tl.load(stream + column).to(tl.float32)
    tl.store(out + column, added.to(out.dtype.element_ty))


_GATE_N, _GATE_K, _GATE_WARPS, _DOWN_N = 2, 1024, 2, 4
"""A program multiplies this number of columns of gate and as many of up, ``_GATE_K`` of their rows at a time, or columns of
``down``. With two warps for each program they are the fastest for Qwen3-30B-A3B on an H200."""
_WHOLE, _WHOLE_WARPS = 2048, 4
"""Rows of gate and up of this size are loaded whole, with this number of warps."""
_MOST_EARLY = 4096
"""Up to this number of columns of ``down`` a program holds whole rows."""
_PIECE = 256
"""The columns of ``down`` of one expert that ``_down_added`` loads at once, 16 bytes for each thread of a warp."""


def _inner(x: torch.Tensor, routing: Routing, weights: ExpertWeights) -> torch.Tensor:
    """Return the activations ``[top_k, size]`` of the token's experts."""
    count, hidden, size = weights.down.shape
    top_k, activation = routing.ids.shape[1], weights.activation
    inner = torch.empty(top_k, size, dtype=x.dtype, device=x.device)
    whole = hidden == _WHOLE
    launch(
        _gate_up_one, (cdiv(size, _GATE_N), top_k),
        x, weights.gate_up, weights.gate_up_bias, inner, *routing, weights.first, count, hidden, size,
        activation.alpha, activation.limit or 0.0, activation.offset,
        SCALED=weights.scaled_input, BIAS=weights.gate_up_bias is not None, LIMITED=activation.limit is not None,
        UNGATED=weights.ungated, BLOCK_N=_GATE_N, BLOCK_K=hidden if whole else min(_GATE_K, next_power_of_2(hidden)),
        WHOLE=whole, num_warps=_WHOLE_WARPS if whole else _GATE_WARPS,
    )  # fmt: skip
    return inner


def adds_one_token(weights: ExpertWeights) -> bool:
    """Return whether ``one_token_added`` multiplies with these weights: all experts, without a bias of ``down``, of a size that
    its pieces divide."""
    count, _, size = weights.down.shape
    return count == weights.whole and weights.down_bias is None and size % _PIECE == 0


def one_token_added(x: torch.Tensor, routing: Routing, weights: ExpertWeights, stream: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``stream [1, hidden]`` and what ``experts`` of ``expert_layers`` returns for one token. The number of
    its experts is a power of two."""
    hidden, size = weights.down.shape[1:]
    inner, out = _inner(x, routing, weights), torch.empty_like(stream)
    launch(
        _down_added, (hidden,),
        inner, weights.down, stream, out, *routing, hidden,
        SIZE=size, TOP_K=routing.ids.shape[1], PIECE=_PIECE, SCALED=weights.scaled_input, num_warps=4,
    )  # fmt: skip
    return out


def one_token(
    x: torch.Tensor, routing: Routing, weights: ExpertWeights, shared: torch.Tensor | None, *, in_parts: bool
) -> torch.Tensor:
    """Return what ``experts`` or ``expert_parts`` of ``expert_layers`` returns, for one token."""
    count, hidden, size = weights.down.shape
    top_k, inner = routing.ids.shape[1], _inner(x, routing, weights)
    out = torch.empty(top_k, 1, hidden, dtype=torch.float32, device=x.device) if in_parts else torch.empty_like(x)
    if in_parts and size <= _MOST_EARLY:
        columns = next_power_of_2(size)
        launch(
            _down_early, (cdiv(hidden, _DOWN_N), top_k),
            inner, weights.down, weights.down_bias, out, *routing, weights.first, count, hidden, size,
            SCALED=weights.scaled_input, BIAS=weights.down_bias is not None, BLOCK_N=_DOWN_N,
            BLOCK_K=columns, num_warps=max(2, columns // 512),
        )  # fmt: skip
        return out
    launch(
        _down_one, (cdiv(hidden, _DOWN_N), top_k if in_parts else 1),
        inner, weights.down, weights.down_bias, shared, out, *routing, weights.first, count, hidden, size,
        PLACES=1 if in_parts else top_k, SCALED=weights.scaled_input, BIAS=weights.down_bias is not None,
        SHARED=shared is not None, BLOCK_N=_DOWN_N, BLOCK_K=min(1024, next_power_of_2(size)),
        num_warps=2,
    )  # fmt: skip
    return out
