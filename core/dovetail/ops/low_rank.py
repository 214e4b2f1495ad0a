"""Add the products of adapters (LoRA) to the product of a linear layer: each token has its own adapter, or none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from dovetail.ops.adapter_weights import LowRankWeights, TokenSlots

if TYPE_CHECKING:
    from dovetail.types import IntArray

SMALL_TILE, LARGE_TILE = 16, 64
"""The numbers of tokens that a program of the kernels multiplies at once, in steps of up to ``SMALL_STEP`` tokens and in
larger ones."""
SMALL_STEP = 512


def add_low_rank(out: torch.Tensor, x: torch.Tensor, weights: LowRankWeights, tokens: TokenSlots) -> torch.Tensor:
    """Add to ``out [tokens, out]`` what the adapters make of contiguous ``x [tokens, in]``, and return it."""
    assert len(x) == tokens.num_tokens, "an adapted layer computes all tokens of the step"
    if tokens.tiles is not None:
        from dovetail.ops.triton.low_rank import add_low_rank as add_on_cuda

        return add_on_cuda(out, x, weights, tokens.tiles)
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


def token_groups(slots: IntArray) -> tuple[tuple[int, torch.Tensor | None], ...]:
    """Return ``TokenSlots.groups`` of ``slots`` (int32 ``[tokens]``), in which -1 stands for no adapter."""
    found = np.unique(slots)
    if len(found) == 1:
        return ((int(found[0]), None),) if found[0] >= 0 else ()
    return tuple((int(slot), torch.from_numpy(np.flatnonzero(slots == slot))) for slot in found[found >= 0])


def token_tiles(slots: IntArray, size: int, most: int | None = None) -> tuple[IntArray, IntArray]:
    """Return ``TokenTiles.order`` and ``TokenTiles.tiles`` of ``slots`` (int32 ``[tokens]``), in which -1 stands for no adapter.
    ``tiles`` is padded to ``most`` tiles."""
    order = np.argsort(slots, kind="stable").astype(np.int32)
    tiles: list[tuple[int, int, int]] = []
    found, starts, counts = np.unique(slots[order], return_index=True, return_counts=True)
    for slot, start, count in zip(found.tolist(), starts.tolist(), counts.tolist(), strict=True):
        if slot >= 0:
            tiles += [(slot, at, min(size, start + count - at)) for at in range(start, start + count, size)]
    padded: np.ndarray[Any, np.dtype[np.int32]] = np.zeros((most or len(tiles), 3), np.int32)
    if tiles:
        padded[: len(tiles)] = tiles
    return order, padded


def most_tiles(tokens: int, slots: int) -> int:
    """Return the largest number of tiles of ``SMALL_TILE`` that a step of ``tokens`` tokens can have with ``slots`` slots."""
    return min(tokens, tokens // SMALL_TILE + slots)
