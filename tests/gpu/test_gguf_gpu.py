"""Test products with packed blocks of GGUF, and with weights of bitsandbytes, on a GPU against plain float32 mathematics, in graphs too, and a model with them.

Run: python -m pytest tests/gpu/test_gguf_gpu.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.gguf.block_types import TYPES
from dovetail.gguf.blocks import dequantize
from dovetail.interfaces.expert_shapes import ExpertBlocks, ExpertWeights, Routing
from dovetail.ops.activation import GATES
from dovetail.ops.packed_blocks import PACKED, PackedWeight, pack
from dovetail.ops.triton import expert_layers
from dovetail_quantization.gguf_cuda import PackedProduct
from gguf_blocks import random_blocks
from tiny_gguf import write_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

ODD = (1030, 768)
SHAPES = [(256, 512), (4096, 4096), (1024, 14336), (512, 20480)]


def weight_of(kind: str, n: int, k: int) -> tuple[PackedWeight, torch.Tensor]:
    """Return a packed weight of random blocks, and its elements in float32."""
    blocks = random_blocks(kind, n, k, 1e-3).cuda()
    return PackedWeight(pack(blocks, TYPES[kind]), PACKED[kind], k), dequantize(blocks, TYPES[kind])


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def inputs(m: int, k: int, elements: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return rows whose products with ``elements`` are about 1."""
    return (torch.randn(m, k, device="cuda") / float(elements.square().mean().sqrt()) / k**0.5).to(dtype)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [*((kind, ODD) for kind in PACKED), *((kind, shape) for kind in ("Q4_K", "Q6_K") for shape in SHAPES)],
    ids=str,
)
def test_products_are_those_of_the_dequantized_weight(kind: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight, elements = weight_of(kind, *shape)
    product = PackedProduct([weight])
    assert error(weight.dequantized(torch.float32), elements) < 1e-6
    bias = torch.randn(shape[0], device="cuda", dtype=torch.bfloat16)
    for m in (1, 2, 16, 33, 64, 300):
        x = inputs(m, shape[1], elements)
        plain = x.float() @ elements.T
        assert error(product.forward(x, None), plain) < 6e-3, m
        assert error(product.forward(x, bias), plain + bias.float()) < 6e-3, m
        assert error(product.gated(x, bias, "silu"), GATES["silu"](plain + bias.float())) < 1.5e-2, m
        parts = product.parts(x)
        assert parts is None or error(parts.sum(0), plain) < 6e-3, m


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes_of_activations(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for kind in ("Q4_K", "Q6_K"):
        weight, elements = weight_of(kind, 512, 1024)
        for m in (1, 5, 300):
            x = inputs(m, 1024, elements, dtype)
            exact = (x.double() @ elements.double().T).float()
            assert error(PackedProduct([weight]).forward(x, None), exact) < (1e-3 if dtype is torch.float16 else 2e-3)


def test_modules_of_several_types_in_graphs() -> None:
    torch.manual_seed(0)
    weights, elements = zip(*(weight_of(kind, n, 4096) for kind, n in (("Q4_K", 5120), ("Q6_K", 1024))), strict=True)
    product, whole = PackedProduct(weights), torch.cat(elements)
    for m in (1, 16, 64, 300):
        x = inputs(m, 4096, whole)
        static = x.clone()
        product.forward(static, None)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = product.forward(static, None)
        for _ in range(2):
            static.copy_(x)
            graph.replay()
            assert error(captured, static.float() @ whole.T) < 6e-3
            x = inputs(m, 4096, whole)


def test_rows_of_zeros_and_single_large_numbers() -> None:
    torch.manual_seed(0)
    for kind in ("Q4_K", "Q6_K"):
        weight, elements = weight_of(kind, 256, 1024)
        x = torch.zeros(1, 1024, device="cuda", dtype=torch.bfloat16)
        assert not PackedProduct([weight]).forward(x, None).any()
        x[0, 700], x[0, 3] = 3e4, 1e-3
        assert error(PackedProduct([weight]).forward(x, None), x.float() @ elements.T) < 6e-3


def test_a_model_computes_with_packed_blocks(tmp_path: Path) -> None:
    """The embedded model in blocks of type Q8_0, in graphs, has nearly the log-probabilities of its dequantized weights in float32
    on a CPU."""
    file = write_tiny(tmp_path / "tiny.gguf", quantized=True)
    prompts = [[5, 90, 33, 17], [7, 8, 9], list(range(5, 105))]
    given = SamplingParams(max_new_tokens=8, temperature=0, logprobs=1, ignore_eos=True)
    found = []
    for device, dtype, quantization in (("cpu", "float32", "none"), ("cuda", "bfloat16", "gguf")):
        model = {"path": str(file), "dtype": dtype}
        llm = LLM(model=model, device=device, memory={"kv_gib": 0.5}, quantization=quantization)
        found.append(llm.generate(prompts, given))
        llm.close()
    for exact, got in zip(*found, strict=True):
        pairs = list(zip(exact.token_ids, got.token_ids, strict=True))
        equal = next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs))
        for index in range(equal):
            assert got.logprobs[index].logprob == pytest.approx(exact.logprobs[index].logprob, abs=0.25)
        if equal < len(pairs):  # two tokens that are about equally likely
            assert got.logprobs[equal].logprob == pytest.approx(exact.logprobs[equal].logprob, abs=0.25)


def expert_by_expert(x: torch.Tensor, routing: Routing, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Compute a layer of experts in float64."""
    total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(len(down)):
        tokens, places = (routing.ids == expert).nonzero(as_tuple=True)
        gate, up = (x[tokens].double() @ gate_up[expert].double().T).chunk(2, 1)
        result = (torch.nn.functional.silu(gate) * up) @ down[expert].double().T
        total.index_add_(0, tokens, result * routing.weights[tokens, places, None].double())
    return total


@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), *((kind, kind) for kind in PACKED)], ids=str)
def test_experts_are_those_of_the_dequantized_weights(kinds: tuple[str, str]) -> None:
    """Layers of experts in packed blocks, also captured, for one token and for many."""
    torch.manual_seed(0)
    count, hidden, size, top_k = 16, 1024, 768, 4
    given, exact = [], []
    for kind, rows, columns in ((kinds[0], 2 * size, hidden), (kinds[1], hidden, size)):
        weight, elements = weight_of(kind, count * rows, columns)
        given.append(weight.rows.view(count, rows, -1))
        exact.append(elements.view(count, rows, columns))
    weights = ExpertWeights(*given, format="gguf", blocks=ExpertBlocks(*kinds, packed=True), whole=count)
    for tokens in (1, 2, 40, 700) if kinds[0] != kinds[1] else (1, 40, 700):
        x = inputs(tokens, hidden, exact[0])
        routing = Routing(
            torch.rand(tokens, count, device="cuda").topk(top_k, 1).indices.int(), torch.rand(tokens, top_k).cuda()
        )
        expected = expert_by_expert(x, routing, *exact)
        assert error(expert_layers.experts(x, routing, weights), expected) < 1e-2, tokens
        assert error(expert_layers.expert_parts(x, routing, weights).sum(0), expected) < 1e-2, tokens
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = expert_layers.experts(x, routing, weights)
        graph.replay()
        assert error(captured, expected) < 1e-2, tokens
