"""Test that norms and gates which quantize what they compute give the bits of separate kernels, interpreted on the CPU.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_fp8_fused_triton.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import dovetail.ops.norm as norm_ops
import dovetail_quantization.fp8 as fp8
import dovetail_quantization.fp8_products as products
import dovetail_quantization.triton.norm as norm_kernels
import dovetail_quantization.triton.quantize as quantize_kernels
from dovetail.engine.build import as_module, build_model
from dovetail.interfaces.mesh import SINGLE
from dovetail.interfaces.quantization import Activation, QuantizationContext, QuantizedActivations
from dovetail.layers.base import Layer, prepare_layers
from dovetail.layers.decoder import DecoderLayer
from dovetail.layers.linear import DenseProduct, Linear
from dovetail.layers.norm import RMSNorm
from dovetail.ops.parts import Parts, RankAddend
from dovetail.ops.triton import activation, norm
from dovetail_models.blocks import SandwichLayer
from dovetail_models.dense import DenseModel
from dovetail_models.dense_describe import describe_llama
from dovetail_models.gemma import GemmaModel
from dovetail_models.gemma_describe import describe_gemma2
from dovetail_models.moe import MoeModel
from dovetail_models.moe_describe import describe_olmoe
from dovetail_quantization.config import Fp8Config
from dovetail_quantization.fp8_activations import Fp8Quantizer
from dovetail_quantization.triton import few_rows

CPU = torch.device("cpu")
QUANTIZERS = [
    Fp8Quantizer(),
    Fp8Quantizer(bound=1.5),
    Fp8Quantizer(32),
    Fp8Quantizer(128),
    Fp8Quantizer(static=torch.tensor(0.004)),
]
EPS = 1e-5


def same(got: QuantizedActivations, expected: QuantizedActivations) -> None:
    assert got.dtype == expected.dtype
    assert got.codes.view(torch.uint8).equal(expected.codes.view(torch.uint8))
    assert got.scales.equal(expected.scales)


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "width"), [(0, 64), (1, 96), (3, 300)])
def test_a_norm_gives_the_bits_of_separate_kernels(
    quantizer: Fp8Quantizer, dtype: torch.dtype, tokens: int, width: int
) -> None:
    torch.manual_seed(0)
    x, residual, weight = (torch.randn(tokens, width).to(dtype) for _ in range(3))
    weight, x[1:2] = torch.randn(width).to(dtype), 0
    same(quantizer.rms_norm(x, weight, EPS), quantizer.quantize(norm.rms_norm(x, weight, EPS)))
    one, other = x.clone(), x.clone()
    got = quantizer.add_rms_norm(one, residual, weight, EPS)
    same(got, quantizer.quantize(norm.rms_norm(other, weight, EPS, residual)))
    assert one.equal(other)
    parts = torch.randn(3, tokens, width)
    got, total = quantizer.add_parts_rms_norm(parts, residual, weight, EPS)
    expected, expected_total = norm.add_parts_rms_norm(parts, residual, weight, EPS)
    same(got, quantizer.quantize(expected))
    assert total.equal(expected_total)


@pytest.mark.parametrize("rows", ["a view", "a weight in float32"])
def test_a_norm_takes_what_the_plain_norm_takes(rows: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 200).to(torch.float16)[:, :96] if rows == "a view" else torch.randn(4, 96).to(torch.float16)
    weight = torch.randn(96) if rows != "a view" else torch.randn(96).to(torch.float16)
    quantizer = Fp8Quantizer(32)
    same(quantizer.rms_norm(x, weight, EPS), quantizer.quantize(norm.rms_norm(x, weight, EPS)))


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("tokens", "width"), [(0, 64), (1, 96), (2, 300)])
def test_a_gate_gives_the_bits_of_separate_kernels(
    quantizer: Fp8Quantizer, dtype: torch.dtype, name: Activation, tokens: int, width: int
) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(tokens, 2 * width).to(dtype)
    gate_up[1:2] = 0
    plain = {"silu": activation.silu_mul, "gelu_tanh": activation.gelu_tanh_mul}[name](gate_up)
    same(quantizer.gate(gate_up, name), quantizer.quantize(plain))


def test_the_gate_of_a_wide_layer_has_one_scale_for_each_token() -> None:
    gate_up = torch.randn(2, 9000).to(torch.float16)
    same(Fp8Quantizer().gate(gate_up, "silu"), Fp8Quantizer().quantize(activation.silu_mul(gate_up)))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Let layers on the CPU use the kernels for many rows, and count their launches."""
    counts = Counter[str]()

    def has_kernels(device: torch.device) -> bool:
        return True

    monkeypatch.setattr(products, "has_kernels", has_kernels)
    monkeypatch.setattr(few_rows, "few_rows", lambda weight, scale: None)
    monkeypatch.setattr(norm_ops, "rms_norm", norm.rms_norm)
    monkeypatch.setattr(norm_ops, "add_rms_norm", lambda x, residual, w, eps: norm.rms_norm(x, w, eps, residual))
    monkeypatch.setattr(products, "GATES", {"silu": activation.silu_mul, "gelu_tanh": activation.gelu_tanh_mul})
    for name, module in {"quantize": quantize_kernels, "norm": norm_kernels}.items():

        def counted(*args: Any, run: Any = module.launch, name: str = name, **kwargs: Any) -> None:
            counts[name] += 1
            run(*args, **kwargs)

        monkeypatch.setattr(module, "launch", counted)
    return counts


LLAMA = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "mlp_bias": True,
}
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 32]}
CHECKPOINTS: dict[str, Mapping[str, Any] | None] = {"by token": None, "by group": BLOCKS, "static": STATIC}


def built(cls: type[Any], info: Any, checkpoint: Mapping[str, Any] | None) -> Any:
    torch.manual_seed(0)
    context = QuantizationContext(checkpoint, torch.float32, CPU)
    model = build_model(cls, info, CPU, torch.float32, SINGLE, quantization=fp8.Fp8(Fp8Config(), context))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in as_module(model).named_parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * (0.1 if parameter.ndim > 1 else 1))
        if "scale" in name:
            parameter.data.abs_().add_(0.5)
    return as_module(model)


def prepare_apart(model: torch.nn.Module) -> None:
    """Prepare the layers without connecting them."""
    for layer in model.modules():
        if isinstance(layer, Layer):
            layer.prepare()


def outputs(layer: DecoderLayer | SandwichLayer) -> list[torch.Tensor]:
    """Return what the products of a layer compute of its norms."""
    x, added = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(1))
    normed, stream = layer.enter(x.clone())
    first, stream = layer.enter(added.clone(), stream)
    mlp_input, _ = layer.mlp_norm.add_forward(added.clone(), stream)
    return [layer.attn.qkv.forward(normed), layer.attn.qkv.forward(first), layer.mlp.forward(mlp_input)]


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_norms_and_gates_quantize_for_the_products_that_follow(kernels: Counter[str], checkpoint: str) -> None:
    models = [
        (DenseModel, describe_llama(LLAMA)),
        (GemmaModel, describe_gemma2({**LLAMA, "mlp_bias": False})),
    ]
    for cls, info in models:
        model = built(cls, info, CHECKPOINTS[checkpoint])
        prepare_layers(model)
        kernels.clear()
        fused = outputs(model.layers[0])
        assert kernels == {"norm": 3, "quantize": 1}  # the gate
        prepare_apart(model)
        kernels.clear()
        apart = outputs(model.layers[0])
        assert kernels == {"quantize": 4}
        for one, other in zip(fused, apart, strict=True):
            assert one.isfinite().all()
            assert one.equal(other)


def test_what_is_not_prepared_computes_the_same(kernels: Counter[str]) -> None:
    model = built(DenseModel, describe_llama(LLAMA), None)
    before = outputs(model.layers[0])
    assert kernels["norm"] == 0
    prepare_layers(model)
    assert all(one.equal(other) for one, other in zip(outputs(model.layers[0]), before, strict=True))


def test_norms_that_routers_read_stay_as_they_are(kernels: Counter[str]) -> None:
    """Norms over all heads are within the projections, which accept quantized inputs too."""
    config = {**LLAMA, "mlp_bias": False, "num_experts": 4, "num_experts_per_tok": 2}
    model = built(MoeModel, describe_olmoe(config), None)
    prepare_layers(model)
    layer = model.layers[0]
    x = torch.randn(3, 128)
    assert isinstance(layer.mlp_norm.forward(x), torch.Tensor)
    assert isinstance(layer.enter(x)[0], QuantizedActivations)
    got = layer.attn.qkv.forward(layer.enter(x)[0])
    assert got.equal(layer.attn.qkv.forward(norm.rms_norm(x, layer.attn_norm.weight, layer.attn_norm.eps)))


def test_layers_that_read_one_norm_in_different_forms_quantize_it_themselves(kernels: Counter[str]) -> None:
    from dovetail.layers.quantized import quantize_output

    layers = [built(DenseModel, describe_llama(LLAMA), checkpoint).layers[0] for checkpoint in (None, BLOCKS)]
    one, other = (layer.attn.qkv for layer in layers)
    own, x = RMSNorm(128, EPS), torch.randn(3, 128)
    for readers in ((one, other), (one, Linear(128, 16)), (Linear(128, 16), one), (Linear(128, 16),)):
        own.prepare()
        quantize_output(own, *readers)
        assert isinstance(own.forward(x), torch.Tensor)
    quantize_output(own, one, one)
    assert isinstance(own.forward(x), QuantizedActivations)
    own.prepare()
    assert isinstance(own.forward(x), torch.Tensor)


def test_the_sum_over_ranks_is_quantized_after_their_norm(kernels: Counter[str]) -> None:
    own = RMSNorm(96, EPS)
    torch.nn.init.normal_(own.weight)
    x, residual = torch.randn(2, 4, 96)
    expected, total = SINGLE.tp.all_reduce_norm(x.clone(), residual, own.weight, EPS)
    own.prepare()
    for quantizer in (Fp8Quantizer(32), Fp8Quantizer(32, few_rows=4)):
        own.quantize_with(quantizer)
        got, stream = own.add_forward(RankAddend(x.clone(), SINGLE.tp), residual)
        assert stream.equal(total)
        if quantizer.few_rows:
            assert got.equal(expected)
            continue
        assert isinstance(got, QuantizedActivations)
        same(got, quantizer.quantize(expected))


def test_few_rows_stay_tensors(kernels: Counter[str]) -> None:
    torch.manual_seed(0)
    own, weight = RMSNorm(96, EPS), torch.randn(96)
    own.weight.data.copy_(weight)
    own.prepare()
    own.quantize_with(Fp8Quantizer(few_rows=3))
    for rows in (3, 4):
        x, residual, parts = torch.randn(rows, 96), torch.randn(rows, 96), Parts(torch.randn(2, rows, 96))
        kind = torch.Tensor if rows == 3 else QuantizedActivations
        results = own.forward(x), own.add_forward(x.clone(), residual)[0], own.add_forward(parts, residual)[0]
        assert all(isinstance(result, kind) for result in results)
    assert own.forward(x[:3]).equal(norm.rms_norm(x[:3], weight, EPS))
    gate_up = Linear(96, 64)
    torch.nn.init.normal_(gate_up.weight)
    gate_up.prepare()
    expected = gate_up.gated_forward(x[:3])
    gate_up.quantize_gate(Fp8Quantizer(few_rows=3))
    assert gate_up.gated_forward(x[:3]).equal(expected)
    assert isinstance(gate_up.gated_forward(x), QuantizedActivations)


@pytest.mark.parametrize("block", [None, (128, 128)])
def test_the_kernel_of_few_rows_reads_what_a_norm_quantized(block: tuple[int, int] | None) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(128, 256).to(torch.float8_e4m3fn), torch.randn(3, 256)
    scale = torch.rand(128 if block is None else (1, 2)) + 0.5
    product = (
        products.RowScaled(weight, scale, None, None) if block is None else products.BlockScaled(weight, scale, block)
    )
    assert product._most >= len(x)
    quantized = Fp8Quantizer(None if block is None else 128).quantize(x)
    assert product.forward(quantized, None).equal(product.forward(x, None))
    assert product.gated(quantized, None, "silu").equal(product.gated(x, None, "silu"))


def test_layers_that_are_not_quantized_call_the_functions_themselves() -> None:
    model = as_module(build_model(DenseModel, describe_llama(LLAMA), CPU, torch.float32, SINGLE))
    prepare_layers(model)
    assert {module._rms_norm for module in model.modules() if isinstance(module, RMSNorm)} == {norm_ops.rms_norm}
    assert {type(module.product) for module in model.modules() if isinstance(module, Linear)} == {DenseProduct}
