"""Add the products of adapters (LoRA) to the product of a linear layer: each token has its own adapter, or none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from dovetail.ops.adapter_weights import (
    AdapterCount,
    EmbeddingLowRank,
    ExpertLowRank,
    LowRankWeights,
    TokenSlots,
    TokenTiles,
)
from dovetail.ops.triton.tuning import MAX_ROWS

if TYPE_CHECKING:
    from dovetail.types import IntArray

SMALL_TILE, LARGE_TILE = 16, 64
"""The numbers of tokens that a program of the kernels multiplies at once, in steps of up to ``SMALL_STEP`` tokens and in
larger ones."""
SMALL_STEP = 512
FEW_SLOTS, SEVERAL_SLOTS = 8, 24
"""Up to these numbers, adapters that occur in a step are few or several (see ``AdapterCount``)."""
ONE_ROWS = 64
"""The largest number of rows of a step for which there are kernels for one adapter."""
SEVERAL_ROWS = range(33, 65)
"""The numbers of rows of a step for which kernels for several adapters were measured to be faster than those for many."""


def adapter_count(occur: int) -> AdapterCount:
    """Return the count of a step in which ``occur`` adapters occur."""
    bounds = {
        AdapterCount.NONE: 0,
        AdapterCount.ONE: 1,
        AdapterCount.FEW: FEW_SLOTS,
        AdapterCount.SEVERAL: SEVERAL_SLOTS,
    }
    return next((count for count, most in bounds.items() if occur <= most), AdapterCount.MANY)


def kernel_count(count: AdapterCount, rows: int) -> AdapterCount:
    """Return for which count the kernels of a step of ``rows`` rows are chosen. Those for one adapter compute up to ``ONE_ROWS`` rows, those for several adapters are the fastest for
    a number of rows in ``SEVERAL_ROWS`` only, and products of more than ``MAX_ROWS`` rows have one kernel for any number of adapters."""
    several = count is AdapterCount.SEVERAL and rows not in SEVERAL_ROWS
    if several or (count and rows > MAX_ROWS):
        return AdapterCount.MANY
    return AdapterCount.FEW if count is AdapterCount.ONE and rows > ONE_ROWS else count


def add_low_rank(out: torch.Tensor, x: torch.Tensor, weights: LowRankWeights, tokens: TokenSlots) -> torch.Tensor:
    """Add to ``out [tokens, out]`` what the adapters make of contiguous ``x [tokens, in]``, and return it."""
    assert len(x) == tokens.num_tokens, "an adapted layer computes all tokens of the step"
    if tokens.tiles is not None:
        return _add_on_cuda(out, x, weights, tokens.tiles)
    for slot, index in tokens.groups:
        rows = x if index is None else x.index_select(0, index)
        for part, (start, size) in enumerate(weights.parts):
            rank = int(weights.ranks[slot, part])
            if rank:
                low = functional.linear(rows, weights.a[slot, part, :rank])
                own, place = (
                    functional.linear(low, weights.b[slot, start : start + size, :rank]),
                    out[:, start : start + size],
                )
                place.add_(own) if index is None else place.index_add_(0, index, own)
    return out


def add_embedding(
    out: torch.Tensor, token_ids: torch.Tensor, weights: EmbeddingLowRank, tokens: TokenSlots
) -> torch.Tensor:
    """Add to the embeddings ``out [tokens, out]`` what the adapters add to the rows ``token_ids`` (int64 ``[tokens]``) of the
    table, and return it."""
    assert len(token_ids) == tokens.num_tokens, "an adapted embedding looks up all tokens of the step"
    if tokens.tiles is not None:
        from dovetail.ops.triton import low_rank

        return low_rank.add_embedding(out, token_ids, weights, tokens.tiles)
    for slot, index in tokens.groups:
        rank = int(weights.ranks[slot, 0])
        if rank:
            rows = token_ids if index is None else token_ids.index_select(0, index)
            own = functional.linear(weights.a[slot, :, :rank].index_select(0, rows), weights.b[slot, :, :rank])
            out.add_(own) if index is None else out.index_add_(0, index, own)
    return out


def add_low_rank_pairs(
    out: torch.Tensor, x: torch.Tensor, weights: ExpertLowRank, slots: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    """Add to ``out [pairs, out]`` what the adapters make of ``x [pairs, in]``, on the CPU, and return it. A pair has a slot in
    ``slots``, or -1, and an expert in ``experts``, counted from the first one of this rank (both int64 ``[pairs]``)."""
    count, num_parts = weights.a.shape[1], len(weights.parts)
    keys = torch.where(slots < 0, -1, slots * count + experts).numpy()
    for slot, index in token_groups(keys):
        slot, expert = divmod(slot, count)
        rows = x if index is None else x.index_select(0, index)
        for part, (start, size) in enumerate(weights.parts):
            rank = int(weights.ranks[slot, expert * num_parts + part])
            if rank:
                low = functional.linear(rows, weights.a[slot, expert, part, :rank])
                own = functional.linear(low, weights.b[slot, expert, start : start + size, :rank])
                place = out[:, start : start + size]
                place.add_(own) if index is None else place.index_add_(0, index, own.to(out.dtype))
    return out


def _add_on_cuda(out: torch.Tensor, x: torch.Tensor, weights: LowRankWeights, tokens: TokenTiles) -> torch.Tensor:
    from dovetail.ops.triton import low_rank, low_rank_few

    if len(x) <= MAX_ROWS and tokens.size == SMALL_TILE:
        return low_rank_few.expand(out, low_rank_few.shrink(x, weights, tokens), weights, tokens)
    return low_rank.add_low_rank(out, x, weights, tokens)


def token_slots(slots: IntArray) -> TokenSlots:
    """Return what the CPU needs of ``slots`` (int32 ``[tokens]``), in which -1 stands for no adapter."""
    return TokenSlots(len(slots), token_groups(slots), None, torch.from_numpy(slots.astype(np.int64)))


def token_groups(slots: Any) -> tuple[tuple[int, torch.Tensor | None], ...]:
    """Return ``TokenSlots.groups`` of ``slots`` (an array of integers, ``[tokens]``), in which -1 stands for no adapter."""
    found = np.unique(slots)
    if len(found) == 1:
        return ((int(found[0]), None),) if found[0] >= 0 else ()
    return tuple((int(slot), torch.from_numpy(np.flatnonzero(slots == slot))) for slot in found[found >= 0])


def packed_tiles(slots: IntArray, size: int, rows: int | None = None, most: int | None = None) -> IntArray:
    """Return the arrays of ``TokenTiles`` of ``slots`` (int32 ``[tokens]``), in which -1 stands for no adapter, in one array, which
    ``unpacked_tiles`` divides. It is padded to ``rows`` tokens and ``most`` tiles."""
    order = np.argsort(slots, kind="stable").astype(np.int32)
    tiles: list[tuple[int, int, int]] = []
    found, starts, counts = np.unique(slots[order], return_index=True, return_counts=True)
    for slot, start, count in zip(found.tolist(), starts.tolist(), counts.tolist(), strict=True):
        if slot >= 0:
            tiles += [(slot, at, min(size, start + count - at)) for at in range(start, start + count, size)]
    rows, most = len(slots) if rows is None else rows, max(1, len(tiles)) if most is None else most
    packed = np.zeros(2 + 4 * rows + 3 * most, np.int32)
    used, per_row, rest = packed[:2], packed[2 : 2 + 4 * rows].reshape(4, rows), packed[2 + 4 * rows :]
    own = found[found >= 0]
    used[:] = len(tiles), len(own)
    per_row[0, : len(slots)] = order
    per_row[1:3] = -1
    for index, (_, start, count) in enumerate(tiles):
        per_row[1, order[start : start + count]] = index
    per_row[2, : len(slots)] = np.where(slots < 0, -1, np.searchsorted(own, slots))
    per_row[3, : len(own)] = own
    if tiles:
        rest[: 3 * len(tiles)] = np.array(tiles, np.int32).reshape(-1)
    return packed


def unpacked_tiles(
    packed: torch.Tensor,
    size: int,
    rows: int,
    tokens: int,
    most: int | None = None,
    count: AdapterCount = AdapterCount.MANY,
) -> TokenTiles:
    """Return views of what ``packed_tiles`` returned for ``rows`` rows, for the first ``tokens`` of them and ``most`` tiles. See
    ``TokenTiles`` for ``count``."""
    order, places, groups, slots = packed[2 : 2 + 4 * rows].view(4, rows)[:, :tokens]
    tiles = packed[2 + 4 * rows :].view(-1, 3)[:most]
    return TokenTiles(order, tiles, size, places, packed[:2], groups, slots, count)


def most_tiles(tokens: int, slots: int) -> int:
    """Return the largest number of tiles of ``SMALL_TILE`` that a step of ``tokens`` tokens can have with ``slots`` slots."""
    return min(tokens, tokens // SMALL_TILE + slots)
