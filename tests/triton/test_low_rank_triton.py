"""Test the kernels of adapters, interpreted on the CPU, and the torch path beside them, against float64.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_low_rank_triton.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dovetail.ops import low_rank
from dovetail.ops.adapter_weights import LowRankWeights, TokenSlots, TokenTiles
from dovetail.ops.low_rank import add_low_rank, token_groups, token_tiles
from dovetail.ops.triton import low_rank as kernels

INPUTS, PARTS, RANK, SLOTS = 136, ((0, 70), (70, 16), (86, 33)), 32, 3


def made_weights(ranks: np.ndarray) -> LowRankWeights:
    outputs = sum(size for _, size in PARTS)
    a, b = torch.randn(SLOTS, len(PARTS), RANK, INPUTS), torch.randn(SLOTS, outputs, RANK)
    for slot in range(SLOTS):
        for part, (start, size) in enumerate(PARTS):
            rank = ranks[slot, part]
            a[slot, part, rank:] = b[slot, start : start + size, rank:] = float("nan")  # is not read
    blocks = kernels.row_blocks(PARTS, torch.device("cpu"))
    return LowRankWeights(a, b, PARTS, ranks, torch.from_numpy(ranks), blocks)


def by_definition(out: torch.Tensor, x: torch.Tensor, weights: LowRankWeights, slots: np.ndarray) -> torch.Tensor:
    out = out.double().clone()
    for token, slot in enumerate(slots):
        for part, (start, size) in enumerate(weights.parts):
            rank = int(weights.ranks[slot, part])
            if slot >= 0 and rank:
                a, b = weights.a[slot, part, :rank].double(), weights.b[slot, start : start + size, :rank].double()
                out[token, start : start + size] += b @ (a @ x[token].double())
    return out


@pytest.mark.parametrize("path", ["torch", "triton, tiles that pad"])
@pytest.mark.parametrize("slots", [[-1, 2, -1, 0, 2, 1, 0], [1] * 20 + [-1] + [2] * 3], ids=str)
def test_every_token_gets_what_its_adapter_adds(monkeypatch, path, slots):
    monkeypatch.setattr(kernels, "SPLIT_INPUTS", 64)  # several programs for the inputs of a tile
    monkeypatch.setattr(kernels, "INPUT_BLOCK", 32)
    given = np.array(slots, np.int32)
    weights = made_weights(np.array([[32, 1, 17], [0, 16, 0], [5, 5, 5]], np.int32))
    x, out = torch.randn(len(given), INPUTS), torch.randn(len(given), 119)
    expected = by_definition(out, x, weights, given)
    if path == "torch":
        tokens = TokenSlots(len(given), token_groups(given))
    else:
        most = low_rank.most_tiles(len(given), SLOTS) + 2 if "pad" in path else None
        order, tiles = token_tiles(given, low_rank.SMALL_TILE, most)
        tokens = TokenSlots(len(given), (), TokenTiles(torch.from_numpy(order), torch.from_numpy(tiles), 16))
    torch.testing.assert_close(add_low_rank(out, x, weights, tokens).double(), expected, rtol=1e-5, atol=1e-4)


def test_tiles_hold_every_token_with_an_adapter_once():
    random = np.random.default_rng(0)
    for tokens in (1, 15, 16, 17, 100):
        slots = random.integers(-1, SLOTS, tokens).astype(np.int32)
        order, tiles = token_tiles(slots, 16, low_rank.most_tiles(tokens, SLOTS))
        held = [(int(slot), int(token)) for slot, start, count in tiles for token in order[start : start + count]]
        assert sorted(held) == sorted((int(slot), token) for token, slot in enumerate(slots) if slot >= 0)
