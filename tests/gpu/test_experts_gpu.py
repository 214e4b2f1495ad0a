"""Test layers of experts on CUDA, in captured graphs and with kernels that were compiled, against float64.

Run on a GPU machine: python -m pytest tests/gpu/test_experts_gpu.py
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dovetail.interfaces.expert_shapes import SILU, ExpertWeights, Routing, RoutingRule, SwiGLU
from dovetail.layers.linear import Float32Linear
from dovetail.ops.experts import expert_parts, experts
from dovetail.ops.routing import route
from dovetail.ops.triton.routing import sort_by_expert

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
RULES = {
    "qwen3": RoutingRule(128, 8, renormalize=True),
    "gpt-oss": RoutingRule(32, 4, after_choice=True),
    "glm4": RoutingRule(160, 8, "sigmoid", renormalize=True, corrected=True, scale=2.5),
    "deepseek3": RoutingRule(256, 8, "sigmoid", renormalize=True, corrected=True, groups=8, groups_kept=4),
    "phimoe": RoutingRule(16, 2, "sparsemixer"),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", RULES)
def test_the_device_chooses_as_the_host_does(name: str) -> None:
    rule = RULES[name]
    logits = torch.randn(300, rule.num_experts)
    logits[7] = 0.25
    correction = torch.randn(rule.num_experts) / 16 if rule.corrected else None
    expected = route(logits, rule, correction)
    got = route(logits.cuda(), rule, None if correction is None else correction.cuda())
    same = (got.ids.cpu() == expected.ids).all(1)
    assert same[7]
    assert same.float().mean() > 0.98, "scores that differ in the last bit may be chosen in another order"
    torch.testing.assert_close(got.weights.cpu()[same], expected.weights[same], atol=1e-5, rtol=1e-4)


def layer(name: str, hidden: int, size: int, dtype: torch.dtype, **more: int) -> ExpertWeights:
    count, bias = more.pop("held", RULES[name].num_experts), name == "gpt-oss"

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device="cuda") / 8).to(dtype)

    biases = (random(count, 2 * size), random(count, hidden)) if bias else (None, None)
    activation = SwiGLU(1.702, 7.0, 1.0) if bias else SILU
    weights = ExpertWeights(random(count, 2 * size, hidden), random(count, hidden, size), activation, *biases)
    return dataclasses.replace(weights, whole=RULES[name].num_experts, **more)


def exact(x: torch.Tensor, routing: Routing, weights: ExpertWeights) -> torch.Tensor:
    """Compute the layer on the host in float64."""
    tensors = {
        field.name: value.cpu().double()
        for field in dataclasses.fields(weights)
        if isinstance(value := getattr(weights, field.name), torch.Tensor)
    }
    given = Routing(routing.ids.cpu(), routing.weights.cpu())
    return experts(x.cpu().double(), given, dataclasses.replace(weights, **tensors))


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest error of a token, relative to its result."""
    return float(((got.cpu().double() - expected).norm(dim=1) / expected.norm(dim=1)).max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 7, 64, 3000])
def test_logits_of_a_router_in_float32_equal_float64(tokens: int, dtype: torch.dtype) -> None:
    """Products of 16-bit numbers are exact, and their sums are float32, also in a captured graph."""
    with torch.device("cuda"):
        gate = Float32Linear(2048, 64, bias=True)
    gate.weight.data = torch.randn(64, 2048, device="cuda").to(dtype)
    assert gate.bias is not None
    gate.bias.data = torch.randn(64, device="cuda").to(dtype)
    gate.prepare()
    x = torch.randn(tokens, 2048, device="cuda").to(dtype)
    got = gate.forward(x)
    expected = x.double() @ gate.weight.double().T + gate.bias.double()
    assert got.dtype is torch.float32
    torch.testing.assert_close(got.double(), expected, atol=2e-3, rtol=1e-5)
    if not tokens:
        return  # torch warns of graphs in which nothing is launched
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gate.forward(x)
    captured.zero_()
    graph.replay()
    assert captured.equal(got)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES.items(), ids=str)
@pytest.mark.parametrize(("name", "hidden", "size"), [("qwen3", 512, 192), ("gpt-oss", 720, 360), ("phimoe", 128, 72)])
@pytest.mark.parametrize("tokens", [1, 2, 16, 33, 700, 5000])
def test_layers_equal_float64(
    tokens: int, name: str, hidden: int, size: int, dtype: torch.dtype, tolerance: float
) -> None:
    weights, x = layer(name, hidden, size, dtype), torch.randn(tokens, hidden, device="cuda").to(dtype)
    routing = route(torch.randn(tokens, RULES[name].num_experts, device="cuda"), RULES[name])
    expected = exact(x, routing, weights)
    got = experts(x, routing, weights)
    assert error(got, expected) < tolerance
    assert torch.equal(got, experts(x, routing, weights))
    parts = expert_parts(x, routing, weights)
    if parts is not None:
        assert error(parts.sum(0), expected) < tolerance


def test_ranks_with_some_experts_add_up() -> None:
    whole, x = layer("qwen3", 256, 128, torch.float32), torch.randn(40, 256, device="cuda")
    for tokens in (1, 40):
        routing = route(torch.randn(tokens, 128, device="cuda"), RULES["qwen3"])
        expected = experts(x[:tokens], routing, whole)
        total = torch.zeros_like(expected)
        for first in (0, 64):
            own = slice(first, first + 64)
            part = dataclasses.replace(whole, gate_up=whole.gate_up[own], down=whole.down[own], first=first)
            assert expert_parts(x[:tokens], routing, part) is None
            total += experts(x[:tokens], routing, part)
        torch.testing.assert_close(total, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tokens", [1, 16, 300, 3000])
def test_a_graph_follows_every_choice(tokens: int) -> None:
    rule, weights = RULES["qwen3"], layer("qwen3", 256, 128, torch.bfloat16)
    x, logits = torch.randn(tokens, 256, device="cuda").bfloat16(), torch.randn(tokens, 128, device="cuda")
    experts(x, route(logits, rule), weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(x, route(logits, rule), weights)
    for choice in (
        torch.randn(tokens, 128),
        torch.arange(128.0).repeat(tokens, 1),
        torch.full((tokens, 128), torch.nan),
    ):
        logits.copy_(choice)
        graph.replay()
        assert torch.equal(out.isnan(), experts(x, route(logits, rule), weights).isnan())
        torch.testing.assert_close(out, experts(x, route(logits, rule), weights), equal_nan=True)


@pytest.mark.parametrize("experts", [32, 128])
@pytest.mark.parametrize("tokens", [1, 9, 32, 64, 128, 300, 513, 1000, 9000])
def test_pairs_are_sorted_stably(tokens: int, experts: int) -> None:
    """Up to 512 tokens are sorted by one kernel. The rank has the second half of the experts."""
    half = experts // 2
    for skew in (0, 3):
        scores = torch.rand(tokens, experts, device="cuda") + skew * torch.arange(experts, device="cuda") / experts
        ids = scores.topk(8, 1).indices.int().contiguous()
        order, flat = sort_by_expert(ids, half, half, 16), ids.flatten().long()
        own = flat.argsort(stable=True)[(flat < half).sum() :]
        assert torch.equal(order.pairs[: len(own)].long(), own)
        counts = torch.bincount(flat - half + experts, minlength=2 * experts)[experts : experts + half].tolist()
        starts = [sum(counts[:expert]) for expert in range(half)]
        expected = [
            [expert, start + at, start + min(at + 16, count)]
            for expert, (start, count) in enumerate(zip(starts, counts, strict=True))
            for at in range(0, count, 16)
        ]
        assert order.blocks[: order.used.item()].tolist() == expected
