"""Add the second matrices of adapters to a tile of the product of a layer and few tokens, as further columns of its weight.

An adapter has as many columns as its slot has ranks, twice as many if the tile has gates and gated values: those of the gates come first. The row
of ``x`` of a token has the results of the first matrices in the columns of its adapter, and zeros in those of the others. The slots that occur, and so the columns, are in the
order of ``TokenTiles.slots``. A program of a product that is split adds every SPLIT-th step of columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dovetail.ops.triton.launch import prefetch
from dovetail.ops.triton.low_rank_few import RANK_BLOCK


@triton.jit
def columns_at(at, end, m, slots, own, ranks, rank_stride, GATED: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Describe the SIZE columns from ``at`` on, in blocks of RANK_BLOCK: return the slot of each block, and the rank that its adapter has,
    0 from column ``end`` on. The load of ``slots`` does not wait for ``end``. ``own`` is the part of the tile."""
    slot = slots_at(at, m, slots, GATED, RANK, SIZE)
    return slot, ranks_at(at, end, slot, own, ranks, rank_stride, GATED, RANK, SIZE)


@triton.jit
def slots_at(at, m, slots, GATED: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Return the slots of the blocks of the SIZE columns from ``at`` on."""
    group, _, _ = column_of(at // RANK_BLOCK + tl.arange(0, SIZE // RANK_BLOCK), 0, GATED, RANK)
    return tl.load(slots + tl.minimum(group, m - 1), cache_modifier=".cg").to(tl.int64)


@triton.jit
def ranks_at(at, end, slot, own, ranks, rank_stride, GATED: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Return the ranks that the adapters in ``slot`` have, 0 from column ``end`` on."""
    block = at // RANK_BLOCK + tl.arange(0, SIZE // RANK_BLOCK)
    _, part, _ = column_of(block, own, GATED, RANK)
    return tl.load(ranks + slot * rank_stride + part, mask=block * RANK_BLOCK < end, other=0, cache_modifier=".cg")


@triton.jit
def column_of(block, own, GATED: tl.constexpr, RANK: tl.constexpr):
    """Return the index in ``TokenTiles.slots``, the part, and the first rank of a block of columns."""
    per_part: tl.constexpr = RANK // RANK_BLOCK
    per_slot: tl.constexpr = per_part * 2 if GATED else per_part
    part = block % per_slot // per_part if GATED else own
    return block // per_slot, part, block % per_part * RANK_BLOCK


@triton.jit
def addresses(block, slot, rank, rows, local, b, b_stride, own, GATED: tl.constexpr, RANK: tl.constexpr):
    """Return the addresses of the second matrices ``[rows, blocks of columns]``, and which of them are used."""
    _, part, first = column_of(block, own, GATED, RANK)
    address = b + (slot * b_stride + first)[None] + rows.to(tl.int64)[:, None] * RANK
    used = (first < rank)[None] & (rows >= 0)[:, None]
    return address, used & ((local % 2)[:, None] == part[None]) if GATED else used


@triton.jit
def prefetch_columns(
    part, end, m, slots, own, ranks, rank_stride, rows, local, b, b_stride, otherwise,
    GATED: tl.constexpr, RANK: tl.constexpr, SPLIT: tl.constexpr, FIRST: tl.constexpr, STEP: tl.constexpr, AHEAD: tl.constexpr,
) -> None:  # fmt: skip
    """Prefetch the second matrices that program ``part`` adds, of the first AHEAD columns. In place of others, the addresses ``otherwise
    [rows]`` are prefetched."""
    column = tl.arange(0, AHEAD // RANK_BLOCK) * RANK_BLOCK
    slot, rank = columns_at(0, end, m, slots, own, ranks, rank_stride, GATED, RANK, AHEAD)
    adds = tl.where(column < SPLIT * FIRST, column // FIRST, (column - SPLIT * FIRST) // STEP % SPLIT)
    rank = tl.where(adds == part, rank, 0)
    address, used = addresses(column // RANK_BLOCK, slot, rank, rows, local, b, b_stride, own, GATED, RANK)
    prefetch(tl.where(used, address, otherwise[:, None]))


@triton.jit
def _each(block, SIZE: tl.constexpr):
    """Return the numbers of blocks ``[SIZE // RANK_BLOCK]`` for each of their SIZE columns."""
    return tl.reshape(tl.broadcast_to(block[:, None], [SIZE // RANK_BLOCK, RANK_BLOCK]), [SIZE])


@triton.jit
def add_columns(
    total, first, stride, end, m, low, b, b_stride, ranks, rank_stride, slots, group, rows, local, own, num_parts,
    GATED: tl.constexpr, RANK: tl.constexpr, STEP: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Add to ``total [rows, tokens]`` the products of STEP columns from ``first`` on, then of those ``stride`` further, and so on up to
    ``end``. The matrices of DEPTH steps are requested ahead, in a pipeline like that of the weight, and their slots and ranks before."""
    per_slot: tl.constexpr = RANK * 2 if GATED else RANK
    BLOCK_M: tl.constexpr = total.shape[1]
    token = tl.arange(0, BLOCK_M)
    slot = slots_at(first, m, slots, GATED, RANK, STEP)
    next_slot = slots_at(first + stride, m, slots, GATED, RANK, STEP)
    rank = ranks_at(first, end, slot, own, ranks, rank_stride, GATED, RANK, STEP)
    for at in tl.range(first, end, stride, num_stages=DEPTH):
        column = at + tl.arange(0, STEP)
        own_slot, own_rank = _each(slot, STEP), _each(rank, STEP)
        part = column % (2 * RANK) // RANK if GATED else own + tl.zeros_like(column)
        used = column % RANK // RANK_BLOCK * RANK_BLOCK < own_rank
        matrix = b + (own_slot * b_stride + column % RANK)[None] + rows.to(tl.int64)[:, None] * RANK
        matrix = tl.max_contiguous(tl.multiple_of(matrix, [1, RANK_BLOCK]), [1, RANK_BLOCK])
        taken = used[None] & (rows >= 0)[:, None]
        taken = taken & ((local % 2)[:, None] == part[None]) if GATED else taken
        left = tl.load(matrix, mask=tl.max_constancy(taken, [1, RANK_BLOCK]), other=0.0, cache_modifier=".cg")
        from_low = low + ((token * num_parts)[:, None] + part[None]) * RANK + (column % RANK)[None]
        from_low = tl.max_contiguous(tl.multiple_of(from_low, [1, RANK_BLOCK]), [1, RANK_BLOCK])
        there = used[None] & (group[:, None] == (column // per_slot)[None])
        right = tl.load(from_low, mask=tl.max_constancy(there, [1, RANK_BLOCK]), other=0.0, cache_modifier=".cg")
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
        rank = ranks_at(at + stride, end, next_slot, own, ranks, rank_stride, GATED, RANK, STEP)
        slot = tl.maximum(
            next_slot, 0
        )  # Triton does not pipeline a loop that only hands a value on to the round after the next
        next_slot = slots_at(at + 2 * stride, m, slots, GATED, RANK, STEP)
    return total
