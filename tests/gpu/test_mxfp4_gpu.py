"""Test experts with MXFP4 weights on CUDA, where codes are dequantized in assembly, against float64.

Run on a GPU machine: python -m pytest tests/gpu/test_mxfp4_gpu.py
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from dovetail.interfaces.expert_shapes import SILU, ExpertWeights, Routing, RoutingRule, SwiGLU
from dovetail.ops.expert_formats import dequantized
from dovetail.ops.experts import expert_parts, experts
from dovetail.ops.mxfp4 import dequantize, powers
from dovetail.ops.routing import route
from dovetail.ops.triton import mxfp4_numbers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
EXPERTS = 32
numbers: Any = mxfp4_numbers


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@triton.jit
def _dequantize(codes, scales, low, high, HALF_K: tl.constexpr, BLOCK_N: tl.constexpr, ASSEMBLY: tl.constexpr) -> None:
    row, at, group = tl.arange(0, BLOCK_N), tl.arange(0, HALF_K), tl.arange(0, HALF_K // 16)
    dtype: tl.constexpr = low.dtype.element_ty
    tile = tl.load(codes + row[:, None] * HALF_K + at[None, :])
    own = tl.load(scales + group[:, None] * BLOCK_N + row[None, :])
    factors = numbers.scale_factors(own, dtype, BLOCK_N, HALF_K, ASSEMBLY)
    place = row[:, None] * HALF_K + at[None, :]
    tl.store(low + place, numbers.dequantized_codes(tile, factors, False, dtype, ASSEMBLY))
    tl.store(high + place, numbers.dequantized_codes(tile, factors, True, dtype, ASSEMBLY))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_every_code_and_scale_is_exact(dtype: torch.dtype) -> None:
    kernel: Any = _dequantize
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").view(16, 1, 16).repeat(1, 32, 1).view(16, -1)
    rest = 1.0 if dtype is torch.float16 else 2.0**63
    for first in (100,) if dtype is torch.float16 else (64, 96, 128, 160):
        scale = first + torch.arange(32, device="cuda")[:, None].add(torch.arange(16, device="cuda")) % 32
        if dtype is torch.float16:
            scale = scale.clamp(104, 128)
        scale = scale.to(torch.uint8)
        low, high = (torch.full(codes.shape, torch.nan, dtype=dtype, device="cuda") for _ in range(2))
        kernel[(1,)](codes, scale, low, high, HALF_K=512, BLOCK_N=16, ASSEMBLY=dtype is not torch.float32)
        got = torch.stack((low, high)).double().unflatten(-1, (-1, 16)).permute(1, 2, 0, 3).flatten(1) * rest
        expected = dequantize(codes, torch.full_like(scale, 127), torch.float64)
        expected *= powers(scale, torch.float64).T.repeat_interleave(32, 1)
        assert torch.equal(got, expected)


def weights_of(hidden: int, size: int, dtype: torch.dtype, *, bias: bool, held: int = EXPERTS) -> ExpertWeights:
    def codes(out: int, columns: int) -> torch.Tensor:
        return torch.randint(256, (held, out, columns // 2), dtype=torch.uint8, device="cuda")

    def scale(out: int, columns: int) -> torch.Tensor:
        return torch.randint(119, 124, (held, columns // 32, out), dtype=torch.uint8, device="cuda")

    def random(*shape: int) -> torch.Tensor | None:
        return (torch.randn(shape, device="cuda") / 8).to(dtype) if bias else None

    return ExpertWeights(
        codes(2 * size, hidden),
        codes(hidden, size),
        SwiGLU(1.702, 7.0, 1.0) if bias else SILU,
        random(held, 2 * size),
        random(held, hidden),
        whole=EXPERTS,
        format="mxfp4",
        gate_up_scale=scale(2 * size, hidden),
        down_scale=scale(hidden, size),
    )


def exact(x: torch.Tensor, routing: Routing, weights: ExpertWeights) -> torch.Tensor:
    """Compute the layer in float64, expert by expert."""
    plain, activation = dequantized(weights, torch.float64), weights.activation
    total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(EXPERTS):
        tokens, places = (routing.ids == expert).nonzero(as_tuple=True)
        both = x[tokens].double() @ plain.gate_up[expert].T
        if plain.gate_up_bias is not None:
            both += plain.gate_up_bias[expert].double()
        gate, up = both.chunk(2, 1)
        if activation.limit is not None:
            gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        inner = gate * torch.sigmoid(activation.alpha * gate) * (up + activation.offset)
        result = inner @ plain.down[expert].T
        if plain.down_bias is not None:
            result += plain.down_bias[expert].double()
        total.index_add_(0, tokens, result * routing.weights[tokens, places, None].double())
    return total


def routed(tokens: int) -> Routing:
    return route(torch.randn(tokens, EXPERTS, device="cuda"), RoutingRule(EXPERTS, 4, after_choice=True))


TOKENS = (1, 2, 9, 33, 60, 200, 700, 1024, 3200)
"""Numbers of tokens that have tiles of their own, or other kernels: those that read weights in words, and those that dequantize them first."""
LAYERS = [
    *((tokens, 736, 352, True, dtype) for tokens in TOKENS for dtype in TOLERANCES),
    *((tokens, 512, 256, False, torch.bfloat16) for tokens in TOKENS),
    *((tokens, 96, 64, True, dtype) for tokens in (1, 33, 700) for dtype in TOLERANCES),
]


@pytest.mark.parametrize(("tokens", "hidden", "size", "bias", "dtype"), LAYERS, ids=str)
def test_layers_equal_float64(tokens: int, hidden: int, size: int, bias: bool, dtype: torch.dtype) -> None:
    weights, x = weights_of(hidden, size, dtype, bias=bias), (torch.randn(tokens, hidden, device="cuda") / 4).to(dtype)
    routing, tolerance = routed(tokens), TOLERANCES[dtype]
    expected = exact(x, routing, weights)
    got = experts(x, routing, weights)
    assert ((got.double() - expected).abs() <= tolerance * (expected.abs() + 1)).all()
    assert torch.equal(got, experts(x, routing, weights))
    parts = expert_parts(x, routing, weights)
    assert (parts is not None) == (tokens <= 64)
    if parts is not None:
        assert ((parts.sum(0).double() - expected).abs() <= tolerance * (expected.abs() + 1)).all()


@pytest.mark.parametrize("tokens", [1, 40])
def test_ranks_with_some_experts_add_up(tokens: int) -> None:
    whole, x = weights_of(256, 128, torch.float32, bias=True), torch.randn(tokens, 256, device="cuda")
    routing = routed(tokens)
    expected = experts(x, routing, whole)
    total = torch.zeros_like(expected)
    for first in (0, EXPERTS // 2):
        own = slice(first, first + EXPERTS // 2)
        names = ("gate_up", "down", "gate_up_bias", "down_bias", "gate_up_scale", "down_scale")
        part = dataclasses.replace(whole, first=first, **{name: getattr(whole, name)[own] for name in names})
        total += experts(x, routing, part)
    torch.testing.assert_close(total, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tokens", [1, 16, 60, 300, 4000])
def test_a_graph_follows_every_choice(tokens: int) -> None:
    weights, x = weights_of(256, 128, torch.bfloat16, bias=True), torch.randn(tokens, 256, device="cuda").bfloat16()
    rule, logits = RoutingRule(EXPERTS, 4, after_choice=True), torch.randn(tokens, EXPERTS, device="cuda")
    experts(x, route(logits, rule), weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(x, route(logits, rule), weights)
    for choice in (torch.randn(tokens, EXPERTS), torch.arange(float(EXPERTS)).repeat(tokens, 1)):
        logits.copy_(choice)
        graph.replay()
        torch.testing.assert_close(out, experts(x, route(logits, rule), weights))
