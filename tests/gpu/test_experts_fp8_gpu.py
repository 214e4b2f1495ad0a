"""Test layers of experts in FP8 on CUDA, in captured graphs and with kernels that were compiled, against the same quantization in
float64 on the host.

Run on a GPU machine: python -m pytest tests/gpu/test_experts_fp8_gpu.py
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from dovetail.interfaces.expert_shapes import SILU, ExpertFormat, ExpertWeights, Routing, RoutingRule, SwiGLU
from dovetail.ops.expert_formats import dequantized
from dovetail.ops.experts import expert_parts, experts
from dovetail.ops.routing import route
from dovetail.ops.triton.experts_fp8 import quantize_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs CUDA with FP8"
    ),
]
FP8 = torch.float8_e4m3fn
RULES = {
    "qwen3": RoutingRule(128, 8, renormalize=True),
    "mixtral": RoutingRule(8, 2, renormalize=True),
    "gpt-oss": RoutingRule(32, 4, after_choice=True),
}
FORMATS: tuple[ExpertFormat, ...] = ("fp8_rows", "fp8_blocks")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def layer(name: str, hidden: int, size: int, form: ExpertFormat) -> ExpertWeights:
    count, bias = RULES[name].num_experts, name == "gpt-oss"

    def codes(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device="cuda") * 100).clamp(-448, 448).to(FP8)

    def scales(out: int, columns: int) -> torch.Tensor:
        shape = (out,) if form == "fp8_rows" else (-(-out // 128), -(-columns // 128))
        return (torch.rand(count, *shape, device="cuda") + 0.5) / 400 / columns**0.5

    biases = [torch.randn(count, n, device="cuda").bfloat16() / 4 if bias else None for n in (2 * size, hidden)]
    return ExpertWeights(
        codes(count, 2 * size, hidden),
        codes(count, hidden, size),
        SwiGLU(1.702, 7.0, 1.0) if bias else SILU,
        biases[0],
        biases[1],
        whole=count,
        format=form,
        gate_up_scale=scales(2 * size, hidden),
        down_scale=scales(hidden, size),
    )


def rounded(x: torch.Tensor, size: int, ulps: int = 0) -> torch.Tensor:
    """Return what ``x`` stands for once each ``size`` columns of a row are quantized, in float64 on the host. Quotients are
    too large by ``ulps``."""
    groups = torch.nn.functional.pad(x.cpu().float(), (0, -x.shape[1] % size)).unflatten(1, (-1, size))
    largest = groups.abs().amax(2, keepdim=True)
    scale = torch.where(largest > 0, largest / 448, 1.0)
    quotients = (groups / scale * (1 + ulps * 2**-23)).to(FP8)
    return (quotients.float() * scale).flatten(1)[:, : x.shape[1]].double()


def exact(x: torch.Tensor, routing: Routing, weights: ExpertWeights) -> torch.Tensor:
    """Compute the layer expert by expert in float64, with activations quantized as the kernels do."""
    plain, act, total = dequantized(weights, torch.float64), weights.activation, torch.zeros(x.shape).double()
    ids, factors = routing.ids.cpu(), routing.weights.cpu().double()
    given = rounded(x, x.shape[1] if weights.format == "fp8_rows" else 128)
    biases = [None if one is None else one.cpu().double() for one in (weights.gate_up_bias, weights.down_bias)]
    for expert in ids.unique().tolist():
        token, place = (ids == expert).nonzero(as_tuple=True)
        gate_up = given[token] @ plain.gate_up[expert].cpu().T + (0 if biases[0] is None else biases[0][expert])
        gate, up = gate_up.chunk(2, 1)
        if act.limit is not None:
            gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
        inner = rounded((gate * torch.sigmoid(act.alpha * gate) * (up + act.offset)).to(x.dtype), 128)
        result = inner @ plain.down[expert].cpu().T + (0 if biases[1] is None else biases[1][expert])
        total.index_add_(0, token, result * factors[token, place].unsqueeze(1))
    return total


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    found = float((got.cpu().double() - expected).norm() / expected.norm())
    return found if math.isfinite(found) else math.inf


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("name", "hidden", "size"), [("qwen3", 512, 384), ("gpt-oss", 720, 256), ("mixtral", 1024, 640)]
)
@pytest.mark.parametrize("tokens", [1, 2, 16, 33, 700, 3000])
def test_layers_equal_float64_with_quantized_activations(
    tokens: int, name: str, hidden: int, size: int, form: ExpertFormat
) -> None:
    weights, x = layer(name, hidden, size, form), torch.randn(tokens, hidden, device="cuda").bfloat16()
    routing = route(torch.randn(tokens, RULES[name].num_experts, device="cuda"), RULES[name])
    expected = exact(x, routing, weights)
    got = experts(x, routing, weights)
    assert error(got, expected) < 0.02  # inner values may be rounded to the next number of bfloat16 and of FP8
    assert torch.equal(got, experts(x, routing, weights))
    parts = expert_parts(x, routing, weights)
    assert (parts is not None) == (tokens <= 64)
    if parts is not None:
        assert error(parts.sum(0), expected) < 0.02


@pytest.mark.parametrize("form", FORMATS)
def test_the_number_of_tokens_does_not_change_what_is_quantized(form: ExpertFormat) -> None:
    weights, x = layer("qwen3", 512, 256, form), torch.randn(300, 512, device="cuda").bfloat16()
    routing = route(torch.randn(300, 128, device="cuda"), RULES["qwen3"])
    whole = experts(x, routing, weights)
    for tokens in (1, 2, 16, 40):
        part = Routing(routing.ids[:tokens].contiguous(), routing.weights[:tokens].contiguous())
        assert error(experts(x[:tokens], part, weights), whole[:tokens].cpu().double()) < 0.02


@pytest.mark.parametrize("group", [None, 128])
def test_activations_are_quantized_as_the_host_does(group: int | None) -> None:
    x = torch.randn(77, 2880, device="cuda").bfloat16()
    codes, scales = quantize_rows(x, group, math.inf)
    size = 2880 if group is None else group
    wide = torch.nn.functional.pad(codes.float(), (0, -2880 % size)).unflatten(1, (-1, size)) * scales[:, :, None]
    got = wide.flatten(1)[:, :2880].cpu().double()
    low, high = (rounded(x, size, ulps) for ulps in (-4, 4))  # the device's division is wrong by up to 2
    assert (low != high).float().mean() < 0.02, "few quotients are halfway between two codes"
    assert torch.minimum((got - low).abs(), (got - high).abs()).div(got.abs() + 1e-9).max() < 1e-6
    bounded, _ = quantize_rows(x, group, 1.0)
    assert bounded.float().abs().max() == 448


def test_ranks_with_some_experts_add_up() -> None:
    for form in FORMATS:
        whole, x = layer("qwen3", 256, 128, form), torch.randn(40, 256, device="cuda").bfloat16()
        for tokens in (1, 40):
            routing = route(torch.randn(tokens, 128, device="cuda"), RULES["qwen3"])
            expected, total = experts(x[:tokens], routing, whole).float(), torch.zeros(tokens, 256, device="cuda")
            for first in (0, 64):
                own = slice(first, first + 64)
                names = ("gate_up", "down", "gate_up_scale", "down_scale")
                part = dataclasses.replace(whole, first=first, **{name: getattr(whole, name)[own] for name in names})
                assert expert_parts(x[:tokens], routing, part) is None
                total += experts(x[:tokens], routing, part)
            assert error(total, expected.cpu().double()) < 0.01


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_a_graph_follows_every_choice(tokens: int, form: ExpertFormat) -> None:
    rule, weights = RULES["qwen3"], layer("qwen3", 256, 128, form)
    x, logits = torch.randn(tokens, 256, device="cuda").bfloat16(), torch.randn(tokens, 128, device="cuda")
    experts(x, route(logits, rule), weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(x, route(logits, rule), weights)
    for choice in (torch.randn(tokens, 128), torch.arange(128.0).repeat(tokens, 1)):
        logits.copy_(choice)
        graph.replay()
        assert torch.equal(out, experts(x, route(logits, rule), weights))
    x[0, 0] = math.nan
    assert experts(x, route(logits, rule), weights)[0].isnan().all()
