"""Test products of humming-kernels on a GPU against plain float32 mathematics, in graphs too, and a model with them.

Run: python -m pytest tests/gpu/test_humming_gpu.py
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import threading
from pathlib import Path

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.config.checkpoint import EMBEDDED
from dovetail.ops.activation import GATES
from dovetail.ops.integers import Integers, dequantize, numbers_of
from dovetail_quantization.humming_products import BOUNDS, HummingProduct, scales_of, words_of, zeros_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.skipif(importlib.util.find_spec("humming") is None, reason="needs humming-kernels"),
]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


def random_weight(n: int, k: int, group: int, *, zeros: bool) -> Integers:
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    scales = ((torch.rand(k // group, n, device="cuda") + 0.1) / 256).bfloat16().float()
    own = torch.randint(0, 16, (k // group, n), dtype=torch.uint8, device="cuda") if zeros else None
    return Integers(codes, scales, own)


def product_of(weight: Integers, order: torch.Tensor | None, dtype: torch.dtype) -> HummingProduct:
    return HummingProduct(words_of(weight.codes), weight.scales, weight.zeros, order, dtype)


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


@pytest.mark.parametrize("zeros", [False, True])
def test_the_order_is_that_of_the_package(zeros: bool) -> None:
    from humming import dtypes
    from humming.schema import HummingWeightSchema
    from humming.transform import prepare_layer_config, transform_humming_tensors

    torch.manual_seed(0)
    weight = random_weight(384, 256, 64, zeros=zeros)

    def packed(numbers: torch.Tensor) -> torch.Tensor:
        pairs = numbers.contiguous().unflatten(-1, (-1, 2))
        return (pairs[..., 0] | pairs[..., 1] << 4).view(torch.int32)

    schema = HummingWeightSchema(
        b_dtype=dtypes.uint4, bs_dtype=dtypes.bfloat16, weight_scale_group_size=64, has_zero_point=zeros
    )
    config = prepare_layer_config(384, 256, schema, torch_dtype=torch.bfloat16)
    stored = {"weight": packed(numbers_of(weight.codes)), "weight_scale": weight.scales.T.bfloat16().contiguous()}
    if weight.zeros is not None:
        stored["zero_point"] = packed(weight.zeros).T.contiguous()
    found = transform_humming_tensors(config, stored)
    assert found["weight"].equal(words_of(weight.codes))
    assert found["weight_scale"].equal(scales_of(weight.scales.bfloat16()))
    assert weight.zeros is None or found["zero_point"].equal(zeros_of(weight.zeros))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "group", "zeros"),
    [((6144, 4096), 128, False), ((256, 512), 32, True), ((4096, 14336), 64, False), ((1152, 2048), 128, True)],
)
def test_products_are_those_of_the_numbers(shape: tuple[int, int], group: int, zeros: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, order = random_weight(*shape, group, zeros=zeros), torch.randperm(shape[1], device="cuda").int()
    product = product_of(weight, order, dtype)
    torch.backends.cuda.matmul.allow_tf32 = False
    plain = dequantize(weight._replace(scales=weight.scales.to(dtype)), torch.float32)
    bias = torch.randn(shape[0], device="cuda", dtype=dtype)
    assert product.forward(torch.empty(0, shape[1], device="cuda", dtype=dtype), bias).shape == (0, shape[0])
    for tokens in (1, 3, 16, 17, *BOUNDS, 513, 1000):
        x = torch.randn(tokens, shape[1], device="cuda", dtype=dtype)
        exact = x[:, order.long()].float() @ plain.T
        assert error(product.forward(x, bias), exact + bias.float()) < 1e-2, tokens
        assert error(product.gated(x, bias, "silu"), GATES["silu"](exact + bias.float())) < 2e-2, tokens


def test_graphs_and_threads() -> None:
    torch.manual_seed(0)
    weight = random_weight(4096, 4096, 128, zeros=False)
    product, plain = product_of(weight, None, torch.bfloat16), dequantize(weight, torch.float32)
    for tokens in (1, 16, 64, 200):
        x = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = product.forward(x, None)
        for _ in range(3):
            x.normal_()
            y.zero_()
            graph.replay()
            assert error(y, x.float() @ plain.T) < 1e-2, tokens
        found: list[torch.Tensor] = []

        def on_a_stream(x: torch.Tensor = x, found: list[torch.Tensor] = found) -> None:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(10_000_000)
                doubled = x * 2
                found.append(product.forward(doubled, None))
            stream.synchronize()

        thread = threading.Thread(target=on_a_stream)
        thread.start()
        thread.join()
        assert error(found[0], 2 * x.float() @ plain.T) < 1e-2, tokens


def test_a_model_computes_nearly_the_same(tmp_path: Path) -> None:
    """The log-probabilities of a model are near those with the kernels of Dovetail, also in captured decode steps."""
    for file in EMBEDDED["tiny"].iterdir():
        if "token" in file.name:
            shutil.copy(file, tmp_path)
    vocab_size = json.loads((EMBEDDED["tiny"] / "config.json").read_text())["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": vocab_size}))
    params = SamplingParams(max_new_tokens=6, temperature=0, logprobs=1, ignore_eos=True)
    found = []
    for products in ("triton", "humming"):
        llm = LLM(
            str(tmp_path),
            device="cuda",
            memory={"kv_gib": 0.5},
            model={"load_format": "dummy", "dtype": "bfloat16"},
            quantization={"kind": "integer", "products": products},
        )
        outputs = llm.generate([[5, 90, 33, 17 + row] for row in range(3)], params)
        found.append([output.logprobs[0].logprob for output in outputs])
        assert all(len(output.logprobs) == 6 for output in outputs)
        llm.close()
    assert found[1] == pytest.approx(found[0], abs=0.1)
