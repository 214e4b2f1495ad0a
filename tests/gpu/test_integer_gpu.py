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


SHAPES = [(256, 512), (6144, 4096), (28672, 4096), (4096, 14336)]
PRODUCTS = [
    (0, SHAPES[0], 4, 128, False),
    *((tokens, shape, 4, 128, False) for tokens in (1, 3, 17, 64, 200, 400, 1024) for shape in SHAPES),
    *((tokens, shape, 4, 32, True) for tokens in (1, 3, 17, 64, 200, 400) for shape in (*SHAPES[:2], SHAPES[3])),
    *((tokens, shape, 8, 128, True) for tokens in (1, 17, 64, 200) for shape in SHAPES[:2]),
    *((tokens, shape, 8, 512, False) for tokens in (1, 17, 64, 200) for shape in SHAPES[2:]),
]
"""Weights of 4 bits have kernels and tiles for 1, 2 to 16, 17 to 32, 33 to 64, 65 to 256, and, without zero points, 257 to 512 rows."""


@pytest.mark.parametrize(("tokens", "shape", "bits", "group", "zeros"), PRODUCTS, ids=str)
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
        llm = LLM("tiny", device="cuda", memory={"kv_gib": 0.5}, quantization=quantization)
        (output,) = llm.generate([[5, 90, 33, 17]], params)
        found.append(output.logprobs[0].logprob)
        llm.close()
    assert found[1] == pytest.approx(found[0], abs=0.1)
