"""Test products of integer weights on a GPU against plain float32 mathematics, in graphs too, and a model with them.

Run: python -m pytest tests/gpu/test_integer_gpu.py
"""

from __future__ import annotations

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.ops.activation import GATES
from dovetail.ops.integers import Integers, dequantize
from dovetail_quantization.integer_formats import IntegerActivations
from dovetail_quantization.integer_products import make_product

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def random_weight(n: int, k: int, bits: int, group: int, *, zeros: bool) -> Integers:
    codes = torch.randint(0, 256, (n, k * bits // 8), dtype=torch.uint8, device="cuda")
    scales = (torch.rand(k // group, n, device="cuda") + 0.1) / 2**bits / 16
    own = torch.randint(0, 1 << bits, (k // group, n), dtype=torch.uint8, device="cuda") if zeros else None
    return Integers(codes.view(torch.int8) if bits == 8 else codes, scales, own)


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


@pytest.mark.parametrize("tokens", [0, 1, 3, 16, 17, 64, 65, 1024])
@pytest.mark.parametrize("shape", [(256, 512), (6144, 4096), (28672, 4096), (4096, 14336)])
@pytest.mark.parametrize(("bits", "group", "zeros"), [(4, 128, False), (4, 32, True), (8, 128, True), (8, 512, False)])
def test_products_are_those_of_the_numbers(
    tokens: int, shape: tuple[int, int], bits: int, group: int, zeros: bool
) -> None:
    torch.manual_seed(0)
    weight, order = random_weight(*shape, bits, group, zeros=zeros), torch.randperm(shape[1], device="cuda").int()
    x = torch.randn(tokens, shape[1], device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(shape[0], device="cuda", dtype=torch.bfloat16)
    product = make_product(weight, order, IntegerActivations.WHOLE, None, torch.bfloat16)
    got = product.forward(x, bias)
    assert got.shape == (tokens, shape[0])
    if not tokens:
        return
    plain = x[:, order.long()].float() @ dequantize(weight, torch.float32).T
    assert error(got, plain + bias.float()) < 6e-3
    assert error(product.gated(x, bias, "silu"), GATES["silu"](plain + bias.float())) < 1e-2
    parts = product.parts(x)
    assert parts is None or error(parts.sum(0), plain) < 6e-3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = product.forward(x, bias)
    graph.replay()
    assert captured.equal(got)


@pytest.mark.parametrize("tokens", [1, 16, 17, 200])
def test_int8_activations(tokens: int) -> None:
    torch.manual_seed(0)
    weight = random_weight(512, 1024, 8, 1024, zeros=False)
    x = torch.randn(tokens, 1024, device="cuda", dtype=torch.bfloat16)
    product = make_product(weight, None, IntegerActivations.TOKEN, None, torch.bfloat16)
    assert error(product.forward(x, None), x.float() @ dequantize(weight, torch.float32).T) < 2e-2


def test_a_model_computes_with_rounded_weights() -> None:
    """The embedded model, in integers of 8 bits, gives nearly the log-probabilities of the unquantized one."""
    params = SamplingParams(max_new_tokens=1, temperature=0, logprobs=1)
    found = []
    for quantization in ("none", {"kind": "integer", "bits": 8, "group_size": None}):
        llm = LLM("tiny", device="cuda", quantization=quantization)
        (output,) = llm.generate([[5, 90, 33, 17]], params)
        found.append(output.logprobs[0].logprob)
        llm.close()
    assert found[1] == pytest.approx(found[0], abs=0.1)
