"""Test FP8 products on a GPU against plain float32 mathematics, in graphs too, and a model in FP8.

Run: python -m pytest tests/gpu/test_fp8_gpu.py
"""

from __future__ import annotations

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.interfaces.quantization import QuantizedActivations
from dovetail.ops import norm
from dovetail.ops.activation import GATES
from dovetail.ops.parts import Parts
from dovetail_quantization.fp8_activations import Fp8Quantizer
from dovetail_quantization.fp8_products import dequantize, make_product
from dovetail_quantization.fp8_weights import LARGEST
from dovetail_quantization.triton.few_rows import SPLIT_ROWS

FP8 = torch.float8_e4m3fn
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def rounded(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return ``x`` as its FP8 form stands for it, with a scale for each ``size`` elements."""
    groups = x.float().unflatten(1, (-1, size))
    scale = groups.abs().amax(2, keepdim=True) / LARGEST
    return ((groups / scale).to(FP8).float() * scale).flatten(1)


@pytest.mark.parametrize("tokens", [0, 1, 3, 16, 64, 200, 1024])
@pytest.mark.parametrize("shape", [(256, 512), (4096, 4096), (6144, 4096), (4096, 14336)])
@pytest.mark.parametrize("block", [None, (128, 128)])
@pytest.mark.parametrize("biased", [False, True])
def test_products_are_those_of_the_numbers(
    tokens: int, shape: tuple[int, int], block: tuple[int, int] | None, biased: bool
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape, device="cuda").to(FP8)
    scales = (shape[0],) if block is None else (shape[0] // 128, shape[1] // 128)
    scale = (torch.rand(scales, device="cuda") + 0.5) / 64
    x = torch.randn(tokens, shape[1], device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(shape[0], device="cuda", dtype=torch.bfloat16) if biased else None
    product = make_product(weight, scale, block, None, torch.bfloat16)
    got = product.forward(x, bias)
    assert got.shape == (tokens, shape[0])
    if not tokens:
        return
    given = x.float() if tokens <= SPLIT_ROWS else rounded(x, shape[1] if block is None else 128)
    exact = given @ dequantize(weight, scale, block, torch.float32).T
    exact = exact if bias is None else exact + bias.float()
    error = (got.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < 4e-3  # half of a step of bfloat16, and the order of sums
    parts = product.parts(x)
    if parts is not None:
        plain = exact if bias is None else exact - bias.float()
        assert (parts.sum(0) - plain).square().mean().sqrt() / plain.square().mean().sqrt() < 4e-3
    opens, up = exact.chunk(2, 1)
    gate = torch.nn.functional.silu(opens) * up
    error = (product.gated(x, bias, "silu").float() - gate).square().mean().sqrt() / gate.square().mean().sqrt()
    assert error < 8e-3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = product.forward(x, bias)
    graph.replay()
    assert captured.equal(got)


@pytest.mark.parametrize("tokens", [1, 8, 300])
@pytest.mark.parametrize("biased", [False, True])
def test_a_static_scale_quantizes_activations(tokens: int, biased: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(256, 512, device="cuda").to(FP8)
    scale, static = torch.full((256,), 0.01, device="cuda"), torch.tensor(0.02, device="cuda")
    x = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(256, device="cuda", dtype=torch.bfloat16) if biased else None
    got = make_product(weight, scale, None, static, torch.bfloat16).forward(x, bias)
    quantized = (x.float() / 0.02).clamp(-LARGEST, LARGEST).to(FP8).float() * 0.02
    exact = (x.float() if tokens <= SPLIT_ROWS else quantized) @ (weight.float() * 0.01).T
    exact = exact if bias is None else exact + bias.float()
    assert (got.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt() < 4e-3


def nearly_same(got: QuantizedActivations, expected: QuantizedActivations) -> None:
    """The compiler may add up squares in another order: then single numbers round otherwise."""
    assert got.dtype == expected.dtype
    assert (got.codes.view(torch.uint8) != expected.codes.view(torch.uint8)).float().mean() < 1e-3
    torch.testing.assert_close(got.scales, expected.scales, rtol=8e-3, atol=0)  # one step of bfloat16


@pytest.mark.parametrize("tokens", [1, 16, 300])
@pytest.mark.parametrize("width", [1024, 4096, 5120])
@pytest.mark.parametrize("quantizer", [Fp8Quantizer(), Fp8Quantizer(bound=2.0), Fp8Quantizer(128)], ids=str)
@pytest.mark.parametrize("static", [False, True])
def test_norms_and_gates_that_quantize_compute_what_separate_kernels_do(
    quantizer: Fp8Quantizer, width: int, tokens: int, static: bool
) -> None:
    torch.manual_seed(0)
    if static:
        quantizer = Fp8Quantizer(static=torch.tensor(0.01, device="cuda"))
    x, residual = torch.randn(2, tokens, width, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(width, device="cuda", dtype=torch.bfloat16)
    nearly_same(quantizer.rms_norm(x, weight, 1e-5), quantizer.quantize(norm.rms_norm(x, weight, 1e-5)))
    one, other = x.clone(), x.clone()
    got = quantizer.add_rms_norm(one, residual, weight, 1e-5)
    nearly_same(got, quantizer.quantize(norm.add_rms_norm(other, residual, weight, 1e-5)))
    assert one.equal(other)
    parts = Parts(torch.randn(4, tokens, width, device="cuda"))
    got, total = quantizer.add_parts_rms_norm(parts.addends, residual, weight, 1e-5)
    expected, expected_total = norm.add_parts_rms_norm(parts, residual, weight, 1e-5)
    nearly_same(got, quantizer.quantize(expected))
    assert total.equal(expected_total)
    gate_up = torch.randn(tokens, 2 * width, device="cuda", dtype=torch.bfloat16)
    for name, gate in GATES.items():
        nearly_same(quantizer.gate(gate_up, name), quantizer.quantize(gate(gate_up)))


@pytest.mark.parametrize("tokens", [SPLIT_ROWS + 1, 300])
@pytest.mark.parametrize("block", [None, (128, 128)])
def test_products_take_what_norms_quantized(block: tuple[int, int] | None, tokens: int) -> None:
    """Up to ``SPLIT_ROWS`` rows no norm quantizes, and the product multiplies 16-bit rows."""
    torch.manual_seed(0)
    weight, x = torch.randn(512, 1024, device="cuda").to(FP8), torch.randn(tokens, 1024, device="cuda").bfloat16()
    scale = torch.rand((512,) if block is None else (4, 8), device="cuda") / 64
    product = make_product(weight, scale, block, None, torch.bfloat16)
    quantized = Fp8Quantizer(None if block is None else 128).quantize(x)
    assert product.forward(quantized, None).equal(product.forward(x, None))


def test_a_quantized_model_answers() -> None:
    settings = {"model": {"dtype": "bfloat16"}, "memory": {"kv_gib": 0.5}}
    with LLM("tiny", quantization="fp8", device="cuda", **settings) as llm:
        params = SamplingParams(temperature=0, max_new_tokens=24)
        text = llm.chat([{"role": "user", "content": "What is the capital of France?"}], params).text
    assert "Paris" in text
