"""Test the kernels of adapters, interpreted on the CPU, and the torch path beside them, against float64.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_low_rank_triton.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dovetail.ops import low_rank
from dovetail.ops.activation import GATES
from dovetail.ops.adapter_weights import AdapterCount, LowRankWeights, TokenSlots
from dovetail.ops.low_rank import add_low_rank, packed_tiles, token_groups, unpacked_tiles
from dovetail.ops.triton import adapted_rows
from dovetail.ops.triton import low_rank as kernels
from dovetail.ops.triton import low_rank_few as few
from dovetail.ops.triton.tuning import ProductTile

INPUTS, PARTS, RANK, SLOTS = 136, ((0, 70), (70, 16), (86, 33)), 32, 3
RANKS = np.array([[32, 1, 17], [0, 16, 0], [5, 5, 5]], np.int32)


def made_weights(ranks: np.ndarray, parts=PARTS, inputs: int = INPUTS) -> LowRankWeights:
    outputs = sum(size for _, size in parts)
    a, b = torch.randn(SLOTS, len(parts), RANK, inputs), torch.randn(SLOTS, outputs, RANK)
    for slot in range(SLOTS):
        for part, (start, size) in enumerate(parts):
            rank = ranks[slot, part]
            beyond = -(-rank // 16) * 16
            a[slot, part, beyond:] = b[slot, start : start + size, beyond:] = float("nan")  # is not read
    blocks = kernels.row_blocks(parts, torch.device("cpu"))
    return LowRankWeights(a, b, parts, ranks, torch.from_numpy(ranks), blocks, few.arrivals(torch.device("cpu")))


def made_tiles(slots: np.ndarray, size: int, *, pads: bool, count: AdapterCount = AdapterCount.FEW):
    """Return the tiles of ``slots``, for the kernels for ``count`` adapters; with ``pads``, as a graph of more rows and tiles has them."""
    tokens = len(slots)
    rows, most = (tokens + 3, low_rank.most_tiles(tokens, SLOTS) + 2) if pads else (tokens, None)
    packed = torch.from_numpy(packed_tiles(slots, size, rows, most))
    return unpacked_tiles(packed, size, rows, tokens, most, count=count)


def by_definition(out: torch.Tensor, x: torch.Tensor, weights: LowRankWeights, slots: np.ndarray) -> torch.Tensor:
    out = out.double().clone()
    for token, slot in enumerate(slots):
        for part, (start, size) in enumerate(weights.parts):
            rank = int(weights.ranks[slot, part])
            if slot >= 0 and rank:
                a, b = weights.a[slot, part, :rank].double(), weights.b[slot, start : start + size, :rank].double()
                out[token, start : start + size] += b @ (a @ x[token].double())
    return out


@pytest.mark.parametrize(
    "path", ["torch", "few tokens, tiles that pad", "few tokens, many adapters, tiles that pad", "many tokens"]
)
@pytest.mark.parametrize("slots", [[-1, 2, -1, 0, 2, 1, 0], [1] * 17 + [-1, 2], [-1] * 3], ids=str)
def test_every_token_gets_what_its_adapter_adds(monkeypatch, path, slots):
    monkeypatch.setattr(kernels, "SPLIT_INPUTS", 64)  # several programs for the inputs of a tile
    monkeypatch.setattr(kernels, "INPUT_BLOCK", 32)
    monkeypatch.setattr(few, "INPUT_BLOCK", dict.fromkeys((True, False), 64))
    if path == "many tokens":
        monkeypatch.setattr(low_rank, "MAX_ROWS", 0)
    given = np.array(slots, np.int32)
    weights = made_weights(RANKS)
    x, out = torch.randn(len(given), INPUTS), torch.randn(len(given), 119)
    expected = by_definition(out, x, weights, given)
    tokens = TokenSlots(len(given), token_groups(given))
    if path != "torch":
        tokens = TokenSlots(
            len(given),
            (),
            made_tiles(
                given,
                low_rank.SMALL_TILE,
                pads="pad" in path,
                count=AdapterCount.MANY if "many" in path else AdapterCount.FEW,
            ),
        )
    torch.testing.assert_close(add_low_rank(out, x, weights, tokens).double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("count", [AdapterCount.FEW, AdapterCount.SEVERAL, AdapterCount.MANY])
@pytest.mark.parametrize(("form", "split"), [("whole", 1), ("bias", 2), ("gated", 1), ("gated", 2), ("parts", 2)])
@pytest.mark.parametrize("slots", [[2], [1] * 17 + [-1, 2, 0]], ids=str)
def test_products_add_the_adapters(monkeypatch, form, split, slots, count):
    monkeypatch.setattr(few, "INPUT_BLOCK", dict.fromkeys((True, False), 32))
    monkeypatch.setattr(few, "EACH_SIZE", 256)  # programs of 4 rows of first matrices
    monkeypatch.setattr(adapted_rows, "FIRST", 16)
    monkeypatch.setattr(adapted_rows, "STEP", 32)
    monkeypatch.setattr(adapted_rows, "SEVERAL_STEP", 32)
    monkeypatch.setattr(adapted_rows, "SEVERAL_BLOCK_M", 32)
    tile = ProductTile(32, 64, 32, 4, 2, split)
    monkeypatch.setattr(adapted_rows, "tile_of", lambda rows, n, k: tile)
    parts = ((0, 64), (64, 64))
    given, k = np.array(slots, np.int32), 64
    weights = made_weights(RANKS[:, : len(parts)].copy(), parts, k)
    x, weight = torch.randn(len(given), k) * 0.05, torch.randn(128, k)
    bias = None if form in ("whole", "parts") else torch.randn(128)
    product = adapted_rows.AdaptedRows(weight, weights)
    tiles = made_tiles(given, low_rank.SMALL_TILE, pads=True, count=count)
    assert product.can(tiles, len(x), gated=form == "gated", parts=form == "parts") == (form != "parts" or split > 1)
    got = product(x, bias, tiles, "silu" if form == "gated" else None, in_parts=form == "parts")
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    exact = by_definition(exact, x, weights, given)
    if form == "gated":
        exact = GATES["silu"](exact)
    torch.testing.assert_close((got.sum(0) if form == "parts" else got).double(), exact, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize(("form", "split"), [("whole", 1), ("bias", 2), ("gated", 1), ("gated", 2), ("parts", 2)])
@pytest.mark.parametrize("slots", [[2], [1] * 17 + [-1, -1, 1], [-1, 0], [-1, -1]], ids=str)
def test_products_add_the_only_adapter_without_another_kernel(monkeypatch, form, split, slots):
    tile = ProductTile(32, 64, 32, 4, 2, split)
    monkeypatch.setattr(adapted_rows, "tile_of", lambda rows, n, k: tile)
    monkeypatch.setattr(adapted_rows, "one_adapter_tile", lambda *shape, **options: tile)
    monkeypatch.setattr(adapted_rows, "shrink", None)
    parts = ((0, 64), (64, 64))
    given, k = np.array(slots, np.int32), 64
    weights = made_weights(RANKS[:, : len(parts)].copy(), parts, k)
    x, weight = torch.randn(len(given), k) * 0.05, torch.randn(128, k)
    bias = None if form in ("whole", "parts") else torch.randn(128)
    tiles = made_tiles(given, low_rank.SMALL_TILE, pads=True, count=AdapterCount.ONE)
    product = adapted_rows.AdaptedRows(weight, weights)
    got = product(x, bias, tiles, "silu" if form == "gated" else None, in_parts=form == "parts")
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    exact = by_definition(exact, x, weights, given)
    if form == "gated":
        exact = GATES["silu"](exact)
    torch.testing.assert_close((got.sum(0) if form == "parts" else got).double(), exact, rtol=1e-4, atol=2e-3)


def test_products_whose_tiles_hold_several_parts_are_left_to_other_kernels(monkeypatch):
    monkeypatch.setattr(adapted_rows, "tile_of", lambda rows, n, k: ProductTile(16, 128, 32, 4))
    tiles = made_tiles(np.array([0], np.int32), low_rank.SMALL_TILE, pads=False)
    for parts, gated in ((((0, 64), (64, 192)), False), (((0, 128),), False), (((0, 256),), True)):
        weights = made_weights(RANKS[:, : len(parts)].copy(), parts, 64)
        assert not adapted_rows.AdaptedRows(torch.randn(256, 64), weights).can(tiles, 1, gated=gated)


def test_tiles_hold_every_token_with_an_adapter_once():
    random = np.random.default_rng(0)
    for tokens in (1, 15, 16, 17, 100):
        slots = random.integers(-1, SLOTS, tokens).astype(np.int32)
        made = made_tiles(slots, 16, pads=True)
        order, tiles, places = (one.tolist() for one in (made.order, made.tiles, made.places))
        held = [(slot, token) for slot, start, count in tiles for token in order[start : start + count]]
        assert sorted(held) == sorted((int(slot), token) for token, slot in enumerate(slots) if slot >= 0)
        assert [tiles[place][0] if place >= 0 else -1 for place in places] == slots.tolist()
        assert made.used.tolist() == [sum(count > 0 for _, _, count in tiles), len(set(slots.tolist()) - {-1})]
        assert [int(made.slots[group]) if group >= 0 else -1 for group in made.groups] == slots.tolist()
