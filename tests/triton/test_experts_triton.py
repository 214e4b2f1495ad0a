"""Test the kernels of experts, interpreted on the CPU, against the layers in torch and plain float64 mathematics.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_experts_triton.py
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dovetail.interfaces.expert_shapes import SILU, ExpertWeights, Routing, RoutingRule, SwiGLU
from dovetail.ops import experts as torch_experts
from dovetail.ops import routing as torch_routing
from dovetail.ops.triton import expert_layers as layers
from dovetail.ops.triton import experts as kernels
from dovetail.ops.triton import routing
from dovetail.ops.triton.expert_tiles import ExpertTile, ExpertTiles, invariant_tiles, tiles_of

RULES = {
    "qwen3": RoutingRule(10, 3, renormalize=True),
    "granite": RoutingRule(8, 2, after_choice=True, scale=0.5),
    "llama4": RoutingRule(16, 1, "sigmoid", after_choice=True),
    "minimax": RoutingRule(8, 3, "sigmoid", renormalize=True, corrected=True),
    "glm4": RoutingRule(12, 3, "sigmoid", renormalize=True, corrected=True, groups=3, groups_kept=2, scale=2.5),
    "deepseek2": RoutingRule(8, 3, groups=4, groups_kept=2, group_top=1),
    "narrow groups": RoutingRule(4, 2, groups=4, groups_kept=3),
    "phimoe": RoutingRule(16, 2, "sparsemixer"),
    "all": RoutingRule(5, 5),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", RULES)
def test_the_kernel_chooses_as_torch_does(name: str) -> None:
    rule = RULES[name]
    logits = torch.randn(24, rule.num_experts) * 2
    logits[3] = 0.5  # ties
    logits[4, 1::2] = logits[4, ::2][: rule.num_experts // 2]
    correction = torch.randn(rule.num_experts) / 4 if rule.corrected else None
    got, expected = routing.route(logits, rule, correction), torch_routing.route(logits, rule, correction)
    assert torch.equal(got.ids, expected.ids)
    torch.testing.assert_close(got.weights, expected.weights, atol=1e-6, rtol=1e-5)
    assert routing.route(logits[:0], rule, correction).ids.shape == (0, rule.top_k)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_damaged_logits_choose_different_experts_that_exist(value: float) -> None:
    for rule in RULES.values():
        logits = torch.full((2, rule.num_experts), value)
        logits[1, 0] = 1.0
        ids = routing.route(logits, rule, torch.zeros(rule.num_experts) if rule.corrected else None).ids
        for row in ids.tolist():
            assert len(set(row)) == rule.top_k
            assert all(0 <= expert < rule.num_experts for expert in row)


def choose(tokens: int, experts: int, top_k: int, skew: float = 0.0) -> torch.Tensor:
    scores = torch.rand(tokens, experts) + skew * torch.arange(experts) / experts
    return scores.topk(top_k, 1).indices.int()


@pytest.mark.parametrize("one_kernel", [True, False])
@pytest.mark.parametrize(("first", "held"), [(0, 12), (4, 4), (8, 4)])
@pytest.mark.parametrize(("tokens", "skew"), [(1, 0.0), (20, 1.0), (50, 3.0), (160, 1.0), (341, 2.0), (850, 1.0)])
def test_pairs_are_sorted_by_expert_in_blocks(
    monkeypatch: pytest.MonkeyPatch, tokens: int, skew: float, first: int, held: int, one_kernel: bool
) -> None:
    if not one_kernel:
        monkeypatch.setattr(routing, "ONE_KERNEL", 0)
        monkeypatch.setattr(routing, "CHUNK", 64)
    ids = choose(tokens, 12, 3, skew)
    order = routing.sort_by_expert(ids, first, held, 16)
    expected = [
        [pair for pair, expert in enumerate(ids.flatten().tolist()) if expert == first + local] for local in range(held)
    ]
    flat = [pair for pairs in expected for pair in pairs]
    assert order.pairs[: len(flat)].tolist() == flat
    blocks, start = [], 0
    for local, pairs in enumerate(expected):
        blocks += [[local, start + at, start + min(at + 16, len(pairs))] for at in range(0, len(pairs), 16)]
        start += len(pairs)
    assert order.used.item() == len(blocks)
    assert len(order.blocks) >= len(blocks)
    assert order.blocks[: len(blocks)].tolist() == blocks


def test_there_are_blocks_for_any_choice() -> None:
    for tokens in (1, 5, 16, 17, 100):
        for experts, top_k in ((1, 1), (4, 2), (16, 4)):
            uneven = torch.arange(top_k).repeat(tokens, 1)
            spread = (torch.arange(tokens * top_k) % experts).view(tokens, top_k)
            for ids in (uneven, spread):
                used = sum(-(-int((ids == expert).sum()) // 16) for expert in range(experts))
                assert used <= routing.most_blocks(tokens, top_k, experts, 16)


def weights_of(
    experts: int, hidden: int, size: int, dtype: torch.dtype, *, bias: bool, **more: object
) -> ExpertWeights:
    return ExpertWeights(
        gate_up=(torch.randn(experts, 2 * size, hidden) / 4).to(dtype),
        down=(torch.randn(experts, hidden, size) / 4).to(dtype),
        activation=SwiGLU(1.702, 0.8, 1.0) if bias else SILU,
        gate_up_bias=torch.randn(experts, 2 * size).to(dtype) if bias else None,
        down_bias=torch.randn(experts, hidden).to(dtype) if bias else None,
        **{"whole": experts, **more},  # pyright: ignore[reportArgumentType]
    )


def double(weights: ExpertWeights) -> ExpertWeights:
    tensors = {field: getattr(weights, field) for field in ("gate_up", "down", "gate_up_bias", "down_bias")}
    return dataclasses.replace(weights, **{name: t if t is None else t.double() for name, t in tensors.items()})


EXACT, HALF = (torch.float32, 1e-5), (torch.float16, 4e-3)


@pytest.mark.parametrize(
    ("tokens", "block_m", "precision"),
    [
        (1, 16, EXACT),
        (21, 16, EXACT),
        (21, 64, EXACT),
        pytest.param(1, 16, HALF, marks=pytest.mark.full),
        pytest.param(2, 16, EXACT, marks=pytest.mark.full),
        pytest.param(21, 16, HALF, marks=pytest.mark.full),
        pytest.param(21, 128, HALF, marks=pytest.mark.full),
        pytest.param(150, 128, EXACT, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("kind", ["plain", "bias", "scaled", "some experts"])
def test_products_equal_those_in_double_precision(
    monkeypatch: pytest.MonkeyPatch, tokens: int, kind: str, block_m: int, precision: tuple[torch.dtype, float]
) -> None:
    dtype, tolerance = precision
    monkeypatch.setattr(kernels, "tiles_of", lambda *_: ExpertTiles(block_m, TILE, TILE))
    experts, hidden, size, top_k = 6, 48, 40, 3
    more = {"scaled_input": True} if kind == "scaled" else {"first": 4, "whole": 16} if kind == "some experts" else {}
    weights = weights_of(experts, hidden, size, dtype, bias=kind == "bias", **more)
    ids = choose(tokens, weights.whole, top_k)
    if kind == "some experts":
        ids[0] = torch.tensor([15, 0, 5])
    given = Routing(ids, torch.rand(tokens, top_k))
    x = torch.randn(tokens, hidden).to(dtype)
    shared = torch.randn(tokens, hidden).to(dtype) if kind == "plain" else None
    exact = torch_experts.experts(x.double(), given, double(weights), shared)
    got = layers.experts(x, given, weights, shared)
    assert got.dtype is dtype
    assert ((got.double() - exact).abs() <= tolerance * (exact.abs() + 1)).all()
    if shared is None and kind != "some experts":
        parts = layers.expert_parts(x, given, weights)
        assert parts.shape == (top_k, tokens, hidden)
        assert ((parts.double().sum(0) - exact).abs() <= tolerance * (exact.abs() + 1)).all()


TILE = ExpertTile(32, 32, 4, 2)


def test_no_tokens_and_tiles_of_the_rule() -> None:
    weights = weights_of(4, 32, 24, torch.float32, bias=False)
    empty = Routing(torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2))
    assert layers.experts(torch.empty(0, 32), empty, weights).shape == (0, 32)
    for tokens in (2, 40):
        given = Routing(choose(tokens, 4, 2), torch.rand(tokens, 2))
        x = torch.randn(tokens, 32)
        exact = torch_experts.experts(x.double(), given, double(weights))
        torch.testing.assert_close(layers.experts(x, given, weights).double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "bias", "scaled"])
def test_invariant_tiles_give_a_token_the_same_bits_among_any_others(kind: str) -> None:
    """Tokens of one expert fill several blocks, so that a token is in another row of another block than alone."""
    experts, hidden, size, top_k, tokens = 4, 48, 40, 2, 140
    more = {"scaled_input": True} if kind == "scaled" else {}
    weights = weights_of(experts, hidden, size, torch.float16, bias=kind == "bias", **more)
    ids = choose(tokens, experts, top_k, skew=4.0)
    given, x = Routing(ids, torch.rand(tokens, top_k)), torch.randn(tokens, hidden).half()
    shared, tiles = torch.randn(tokens, hidden).half(), invariant_tiles(hidden, size, 2)
    assert ids.flatten().bincount().max() > tiles.block_m
    whole = layers.experts(x, given, weights, shared, tiles)
    exact = torch_experts.experts(x.double(), given, double(weights), shared)
    assert ((whole.double() - exact).abs() <= 4e-3 * (exact.abs() + 1)).all()
    for start, stop in ((0, 1), (7, 9), (60, 125), (139, 140)):
        own = slice(start, stop)
        alone = layers.experts(x[own], Routing(given.ids[own], given.weights[own]), weights, shared[own], tiles)
        assert torch.equal(alone, whole[own]), f"tokens {start} to {stop}"


@pytest.mark.parametrize("sizes", [(128, 8, 2048, 768), (32, 4, 2880, 2880), (8, 2, 4096, 14336), (64, 8, 2048, 512)])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_fit_into_shared_memory(sizes: tuple[int, int, int, int], itemsize: int) -> None:
    experts, top_k, hidden, size = sizes
    for tokens in (1, 2, 16, 17, 64, 256, 1024, 8192, 65536):
        tiles = tiles_of(tokens, experts, top_k, hidden, size, 1.0, itemsize)
        if tokens <= 16:
            assert tiles.block_m == 16, "an expert has one block, and its weight is read once"
        for tile, columns in ((tiles.gate_up, 2), (tiles.down, 1)):
            held = (tiles.block_m + columns * tile.block_n) * tile.block_k * itemsize * tile.stages
            assert held <= 224 << 10
