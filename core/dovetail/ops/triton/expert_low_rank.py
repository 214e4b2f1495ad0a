"""Multiply the pairs of a token and an expert with the low-rank matrices that the adapters of the tokens have for the expert.

Pairs are sorted by expert (``routing.sort_by_expert``), and the host sees neither the choice of experts nor the order. A block of
pairs of one expert may have tokens of several adapters: a program multiplies the block once for each of them, and the rows
of the others are zeros. So a batch with one adapter costs one pass, and nothing else needs to be sorted. The first kernel
computes ``x @ a.T``. The second multiplies that by ``b.T``: for gate and up it writes what their product adds before the activation,
for ``down`` it adds to the results of pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.expert_pairs import pairs_of_block
from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.low_rank import RANK_BLOCK, ROW_BLOCK

if TYPE_CHECKING:
    from dovetail.ops.adapter_weights import ExpertLowRank, TokenTiles
    from dovetail.ops.triton.routing import ExpertOrder

INPUT_BLOCK = 64
_NO_SLOT = tl.constexpr(1 << 30)


@triton.jit
def _slots_of(places, tiles, token, present):
    """Return the slot of each token, and -1 if it has none or is not ``present``."""
    place = tl.load(places + token, present, -1)
    return tl.load(tiles + tl.maximum(place, 0) * 3, place >= 0, -1)


@triton.jit
def _next_slot(slot, before):
    """Return the lowest slot above ``before``, or ``_NO_SLOT``."""
    return tl.min(tl.where(slot > before, slot, _NO_SLOT), 0)


@triton.jit(do_not_specialize_on_alignment=["ranks", "order", "blocks", "used", "places", "tiles"])
def _shrink(
    x, inputs, a, a_stride, ranks, rank_stride, order, blocks, used, places, tiles, low, num_parts,
    TOP_K: tl.constexpr, BY_PAIR: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    block, unit = tl.program_id(0), tl.program_id(1)
    part, first = unit // (RANK // RANK_BLOCK), unit % (RANK // RANK_BLOCK) * RANK_BLOCK
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if block >= tl.load(used):
        return
    expert, row, pair, present = pairs_of_block(order, blocks, block, BLOCK_M)
    slot = _slots_of(places, tiles, pair // TOP_K, present)
    r, at = first + tl.arange(0, RANK_BLOCK), tl.arange(0, BLOCK_K)
    given = row if BY_PAIR else pair // TOP_K
    source = x + given.to(tl.int64)[:, None] * inputs + at[None, :]
    total = tl.zeros([BLOCK_M, RANK_BLOCK], tl.float32)
    current = _next_slot(slot, -1)
    while current < _NO_SLOT:
        rank = tl.load(ranks + current.to(tl.int64) * rank_stride + expert * num_parts + part)
        matrix = (
            a
            + current.to(tl.int64) * a_stride
            + ((expert * num_parts + part) * RANK + r)[:, None] * inputs
            + at[None, :]
        )
        for start in range(0, tl.where(first < rank, inputs, 0), BLOCK_K):
            more = (start + at < inputs)[None, :]
            left = tl.load(source + start, (slot == current)[:, None] & more, 0.0)
            right = tl.load(matrix + start, (r < rank)[:, None] & more, 0.0)
            total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
        current = _next_slot(slot, current)
    tl.store(low + (row.to(tl.int64) * num_parts + part)[:, None] * RANK + r[None, :], total, present[:, None])


@triton.jit(do_not_specialize_on_alignment=["ranks", "order", "blocks", "used", "places", "tiles", "rows"])
def _expand(
    out, outputs, low, b, b_stride, ranks, rank_stride, order, blocks, used, places, tiles, factors, rows, num_parts,
    TOP_K: tl.constexpr, ONTO: tl.constexpr, SCALED: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, ROW_BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """With ONTO, add to the results of pairs ``[tokens, top_k, outputs]``, times their factors unless inputs are SCALED. Without it, write
    ``[pairs, outputs]`` in the order by expert, which is 0 for pairs without an adapter."""
    block, n_block = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if block >= tl.load(used):
        return
    expert, row, pair, present = pairs_of_block(order, blocks, block, BLOCK_M)
    slot = _slots_of(places, tiles, pair // TOP_K, present)
    part = tl.load(rows + n_block * 3)
    n = tl.load(rows + n_block * 3 + 1) + tl.arange(0, ROW_BLOCK)
    inside = n < tl.load(rows + n_block * 3 + 2)
    source = low + (row.to(tl.int64) * num_parts + part)[:, None] * RANK
    total = tl.zeros([BLOCK_M, ROW_BLOCK], tl.float32)
    current = _next_slot(slot, -1)
    while current < _NO_SLOT:
        rank = tl.load(ranks + current.to(tl.int64) * rank_stride + expert * num_parts + part)
        matrix = b + current.to(tl.int64) * b_stride + (expert * outputs + n)[:, None] * RANK
        for start in range(0, rank, RANK_BLOCK):
            r = start + tl.arange(0, RANK_BLOCK)[None, :]
            left = tl.load(source + r, (slot == current)[:, None] & (r < rank), 0.0)
            right = tl.load(matrix + r, inside[:, None] & (r < rank), 0.0)
            total = tl.dot(left.to(right.dtype), tl.trans(right), total, input_precision="ieee")
        current = _next_slot(slot, current)
    if ONTO:
        if not SCALED:
            total *= tl.load(factors + pair, present, 0.0)[:, None]
        real = (slot >= 0)[:, None] & inside[None, :]
        place = out + pair.to(tl.int64)[:, None] * outputs + n[None, :]
        total += tl.load(place, real, 0.0).to(tl.float32)
        tl.store(place, total.to(out.dtype.element_ty), real)
    else:
        real = present[:, None] & inside[None, :]
        tl.store(out + row.to(tl.int64)[:, None] * outputs + n[None, :], total.to(out.dtype.element_ty), real)


def warps_of(block_m: int) -> int:
    """Return the number of warps of a program that multiplies blocks of ``block_m`` pairs: with fewer, registers are spilled."""
    return 4 if block_m <= 64 else 8


def shrink_pairs(
    x: torch.Tensor,
    weights: ExpertLowRank,
    order: ExpertOrder,
    tokens: TokenTiles,
    top_k: int,
    *,
    by_pair: bool,
) -> torch.Tensor:
    """Return float32 ``[pairs, parts, rank]`` in ``order``: the products of contiguous ``x`` with the first matrices of the adapters. ``x`` is ``[tokens,
    in]``, or, if ``by_pair``, ``[pairs, in]`` in ``order``."""
    a, ranks, pairs = weights.a, weights.device_ranks, len(order.pairs)
    assert ranks is not None
    assert x.is_contiguous()
    num_parts, rank, inputs = a.shape[2:]
    low = torch.empty(pairs, num_parts, rank, dtype=torch.float32, device=x.device)
    launch(
        _shrink, (len(order.blocks), num_parts * (rank // RANK_BLOCK)),
        x, inputs, a, a.stride(0), ranks, ranks.stride(0), *order[:3], tokens.places, tokens.tiles, low, num_parts,
        TOP_K=top_k, BY_PAIR=by_pair, RANK=rank, RANK_BLOCK=RANK_BLOCK, BLOCK_M=order.block_m, BLOCK_K=INPUT_BLOCK,
        num_warps=warps_of(order.block_m),
    )  # fmt: skip
    return low


def expand_pairs(
    out: torch.Tensor,
    low: torch.Tensor,
    weights: ExpertLowRank,
    order: ExpertOrder,
    tokens: TokenTiles,
    top_k: int,
    factors: torch.Tensor | None = None,
    *,
    onto: bool,
) -> torch.Tensor:
    """Multiply ``low``, from ``shrink_pairs``, by the second matrices. With ``onto``, add the products times ``factors`` to the results of pairs
    ``out [tokens, top_k, out]``; otherwise write them to ``out [pairs, out]`` in ``order``. Return it."""
    b, ranks, rows = weights.b, weights.device_ranks, weights.blocks
    assert ranks is not None
    assert rows is not None
    launch(
        _expand, (len(order.blocks), len(rows)),
        out, out.shape[-1], low, b, b.stride(0), ranks, ranks.stride(0), *order[:3], tokens.places, tokens.tiles, factors, rows,
        low.shape[1],
        TOP_K=top_k, ONTO=onto, SCALED=factors is None, RANK=low.shape[2], RANK_BLOCK=RANK_BLOCK, BLOCK_M=order.block_m,
        ROW_BLOCK=ROW_BLOCK, num_warps=warps_of(order.block_m),
    )  # fmt: skip
    return out
