"""Test integer weights: every format of checkpoints, rounding while loading, ranks, and refusals.

Run: python -m pytest tests/plugins/test_integer.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import hypothesis
import numpy as np
import pytest
import torch
import transformers
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dovetail import LLM, SamplingParams
from dovetail.engine.build import as_module, build_model
from dovetail.engine.weights import load_weights
from dovetail.errors import ConfigError, ResolutionError, WeightsError
from dovetail.interfaces.mesh import SINGLE, Mesh
from dovetail.interfaces.model import ModelArchitecture
from dovetail.interfaces.quantization import LinearShape, QuantizationContext
from dovetail.layers.linear import Linear
from dovetail.ops.integers import dequantize, held, numbers_of, quantize
from dovetail.testing.quantization import QuantizationSuite
from dovetail.testing.quantized_experts import LayerOfExperts
from dovetail.testing.ranks import thread_meshes
from dovetail_models.dense import DenseModel
from dovetail_models.dense_describe import describe_llama
from dovetail_quantization.config import IntegerConfig
from dovetail_quantization.integer import Integer
from dovetail_quantization.integer_formats import describe, read_format
from dovetail_quantization.integer_tensors import Packing
from integer_checkpoints import FORMATS, INT8, LEFT_OUT, Format, awq, compressed, gptq, pack

CPU = torch.device("cpu")
FEW = ("awq", "gptq, act-order", "packed, asymmetric")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


class IntegerSuite(QuantizationSuite):
    name = "integer"
    optional = (".g_idx", ".weight_shape")

    def store(
        self, checkpoint: Mapping[str, Any], module: str, weight: torch.Tensor
    ) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        (write,) = [store for config, store in {**FORMATS, **INT8}.values() if config is checkpoint]
        return write(module, weight)

    def write_experts(self, case: str, directory: Path, fused: bool = False, seed: int = 0) -> dict[str, torch.Tensor]:
        if "act-order" in case:
            pytest.skip("refused: experts with act-order")
        return super().write_experts(case, directory, fused, seed)

    def expert_layers(self, case: str, *args: Any, **more: Any) -> list[LayerOfExperts]:
        if "act-order" in case:
            pytest.skip("refused: experts with act-order")
        return super().expert_layers(case, *args, **more)


class TestIntegers(IntegerSuite):
    checkpoints: ClassVar = {name: FORMATS[name].config for name in FEW}


class TestRounded(IntegerSuite):
    settings: ClassVar = {"group_size": 32}
    checkpoints: ClassVar = {"while loading": None}
    loss = 0.2


@pytest.mark.full
class TestRoundedToInt8(IntegerSuite):
    settings: ClassVar = {"group_size": None, "bits": 8, "activations": "int8"}
    checkpoints: ClassVar = {"while loading": None}
    tolerance = 0.02


@pytest.mark.full
class TestAllIntegers(IntegerSuite):
    checkpoints: ClassVar = {name: config for name, (config, _) in FORMATS.items() if name not in FEW}


class TestInt8Activations(IntegerSuite):
    checkpoints: ClassVar = {"w8a8, static": INT8["w8a8, static"].config}
    tolerance = 0.05


@pytest.mark.full
class TestAllInt8Activations(IntegerSuite):
    checkpoints: ClassVar = {name: config for name, (config, _) in INT8.items() if "static" not in name}
    tolerance = 0.05


def write(directory: Path, form: Format, seed: int = 0) -> dict[str, torch.Tensor]:
    """Write a checkpoint of a small Llama, and return the tensors that it stands for."""
    torch.manual_seed(seed)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG, initializer_range=0.2))
    stored, exact = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in model.state_dict().items():
        stored[name] = exact[name] = tensor.detach()
        if name.endswith("_proj.weight") and LEFT_OUT not in name:
            del stored[name]
            tensors, exact[name] = form.store(name.removesuffix(".weight"), tensor.detach())
            stored |= tensors
    (directory / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": form.config}))
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, directory / "model.safetensors")
    return exact


def load(directory: Path, mesh: Mesh = SINGLE) -> ModelArchitecture:
    given = json.loads((directory / "config.json").read_text())
    quantization = Integer(IntegerConfig(), QuantizationContext(given["quantization_config"], torch.float32, CPU))
    model = build_model(DenseModel, describe_llama(given), CPU, torch.float32, mesh, quantization)
    load_weights(model, directory)
    return model


def weight_of(model: torch.nn.Module, name: str) -> torch.Tensor:
    layer = model.get_submodule(name)
    assert isinstance(layer, Linear)
    return layer.dense_weight()


def exchange(directory: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Store another tensor in place of tensor ``name``."""
    tensors = load_file(directory / "model.safetensors")
    del tensors[name]
    if tensor is not None:
        tensors[name] = tensor.contiguous()
    save_file(tensors, directory / "model.safetensors")


def rounded_inputs(*, static: bool) -> Any:
    """Return a hook that rounds inputs of a module to int8 numbers, with the scale of ``INT8`` or one for each token."""

    def rounded(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        scale = torch.tensor(0.04) if static else inputs[0].abs().amax(-1, keepdim=True) / 127
        return ((inputs[0] / scale).round().clamp(-128, 127) * scale,)

    return rounded


@torch.inference_mode()
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.full) for name in (*FORMATS, *INT8)]
)
def test_models_compute_with_the_weights_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    """Log-probabilities are those of transformers with the dequantized weights in float32, within 1e-3; if activations have 8
    bits, with inputs that are rounded before these products, within 0.02."""
    exact = write(tmp_path, {**FORMATS, **INT8}[name])
    reference: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    reference.eval().load_state_dict(exact)
    if name in INT8:
        for path, module in reference.named_modules():
            if path.endswith("_proj") and path != LEFT_OUT:
                module.register_forward_pre_hook(rounded_inputs(static="static" in name))
    llm = LLM(
        str(tmp_path), device="cpu", grammar="none", threads=1, memory={"page_size": 8, "num_pages": 40},
        model={"dtype": "float32"},
    )  # fmt: skip
    prompts = [[5, 17, 3], list(range(40))]
    outputs = llm.generate(prompts, SamplingParams(max_new_tokens=4, temperature=0, logprobs=3, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        given = prompt + list(output.token_ids)
        expected: Any = reference(torch.tensor([given])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        for token, entry, row in zip(output.token_ids, output.logprobs, expected, strict=True):
            assert entry.logprob == pytest.approx(float(row[token]), abs=0.02 if name in INT8 else 1e-3)


def test_ranks_hold_their_shares(tmp_path: Path) -> None:
    """The weights of two ranks are those of one, also if columns are in any order of groups."""
    write(tmp_path, FORMATS["gptq, act-order"])
    whole, (first, second) = as_module(load(tmp_path)), (as_module(load(tmp_path, m)) for m in thread_meshes(2))
    for name, layer in whole.named_modules():
        if isinstance(layer, Linear) and name.endswith(("down", "gate_up")):
            shares = [weight_of(part, name) for part in (first, second)]
            if name.endswith("down"):
                assert torch.cat(shares, 1).equal(layer.dense_weight())
                continue
            gates, ups = zip(*(share.chunk(2) for share in shares), strict=True)
            assert torch.cat((*gates, *ups)).equal(layer.dense_weight())


@hypothesis.given(st.integers(0, 2**31), st.sampled_from((4, 8)), st.integers(1, 5), st.integers(1, 5))
@hypothesis.settings(deadline=None, max_examples=30)
def test_numbers_are_packed_and_unpacked(seed: int, bits: int, rows: int, blocks: int) -> None:
    """What the formats pack is read back, and codes hold every number."""
    rows, columns, generator = 8 * rows, 32 * blocks, np.random.default_rng(seed)
    numbers = generator.integers(0, 2**bits, (rows, columns), dtype=np.uint8)
    expected = torch.from_numpy(numbers)
    assert Packing(bits, 1).unpacked(pack(numbers, bits)).equal(expected)
    assert Packing(bits, 0).unpacked(pack(numbers.T, bits).T).equal(expected)
    assert Packing(bits, 0, transposed=True).unpacked(pack(numbers, bits).T).equal(expected)
    less = pack(((numbers.astype(np.int16) - 1) % 2**bits).astype(np.uint8).T, bits)
    assert Packing(bits, 1, transposed=True, added=1).unpacked(less).equal(expected)
    if bits == 4:
        stored = pack(numbers.T, 4, (0, 2, 4, 6, 1, 3, 5, 7))
        assert Packing(4, 1, transposed=True, interleaved=True).unpacked(stored).equal(expected)
    assert numbers_of(held(expected, bits)).equal(expected)


@hypothesis.given(st.integers(0, 2**31), st.sampled_from((4, 8)), st.booleans())
@hypothesis.settings(deadline=None, max_examples=30)
def test_weights_are_rounded_to_the_nearest(seed: int, bits: int, symmetric: bool) -> None:
    weight = torch.randn(5, 96, generator=torch.Generator().manual_seed(seed)) * 3
    weight[2] = 0
    made = quantize(weight, bits, 32, symmetric=symmetric)
    step = made.scales.mT.repeat_interleave(32, 1)
    error = (dequantize(made, torch.float32) - weight).abs()
    assert (error <= step * (0.5 if symmetric else 1) + 1e-5).all()
    assert (made.zeros is None) == symmetric


BODY = "model.layers.0.self_attn.q_proj"
HOSTILE = {
    "scales that are infinite": ("awq", f"{BODY}.scales", torch.full((2, 64), float("inf")).half(), "scales that are not finite"),
    "numbers of another dtype": ("awq", f"{BODY}.qweight", torch.zeros(64, 8), "is torch.float32; supported: torch.int32"),
    "numbers of another shape": ("awq", f"{BODY}.qweight", torch.zeros(64, 9, dtype=torch.int32), r"has shape \[64, 9\]"),
    "zero points of another shape": ("awq", f"{BODY}.qzeros", torch.zeros(2, 9, dtype=torch.int32), r"has shape \[2, 9\]"),
    "groups beyond the scales": ("gptq, act-order", f"{BODY}.g_idx", torch.full((64,), 7, dtype=torch.int32), "g_idx"),
    "groups below zero": ("gptq, act-order", f"{BODY}.g_idx", torch.full((64,), -3, dtype=torch.int32), "g_idx"),
    "groups that are missing": ("gptq, act-order", f"{BODY}.g_idx", None, "lacks 1 tensors.*g_idx"),
    "groups in another order": ("gptq, 4 bits", f"{BODY}.g_idx", torch.arange(64).flip(0).int() // 32, "g_idx"),
    "other sizes": ("packed, asymmetric", f"{BODY}.weight_shape", torch.tensor([64, 32]), "weight_shape says"),
    "numbers outside 4 bits": ("int4, whole bytes, channel", f"{BODY}.weight", torch.full((64, 64), 9).to(torch.int8), "outside -8 to 7"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_tensors_that_cannot_be_right_are_refused_by_name(tmp_path: Path, case: str) -> None:
    name, tensor_name, tensor, message = HOSTILE[case]
    write(tmp_path, FORMATS[name])
    exchange(tmp_path, tensor_name, tensor)
    with pytest.raises(WeightsError, match=message) as error:
        load(tmp_path)
    assert BODY in str(error.value)


def test_a_weight_that_is_not_stored_as_the_config_says_is_refused_by_name(tmp_path: Path) -> None:
    exact = write(tmp_path, FORMATS["awq"])
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if BODY not in name}
    save_file({**kept, f"{BODY}.weight": exact[f"{BODY}.weight"].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(
        WeightsError, match=rf"has tensor {BODY}.weight, and its quantization stores that weight in .*{BODY}.qweight"
    ):
        load(tmp_path)


def test_a_list_of_groups_that_begins_below_zero_is_refused(tmp_path: Path) -> None:
    """A list of -1 stands for none; -1 within a list is no group."""
    module = "model.layers.0.self_attn.o_proj"
    write(tmp_path, FORMATS["gptq, act-order"])
    groups = load_file(tmp_path / "model.safetensors")[f"{module}.g_idx"]
    groups[0] = -1
    exchange(tmp_path, f"{module}.g_idx", groups)
    with pytest.raises(WeightsError, match=rf"{module} lists groups of columns \(g_idx\) that it has no scales for"):
        load(tmp_path)


def test_tensors_of_no_consequence_may_be_missing(tmp_path: Path) -> None:
    write(tmp_path, FORMATS["gptq, 4 bits"])
    before = weight_of(as_module(load(tmp_path)), "layers.0.attn.qkv")
    for part in "qkv":
        exchange(tmp_path, f"model.layers.0.self_attn.{part}_proj.g_idx", None)
    assert before.equal(weight_of(as_module(load(tmp_path)), "layers.0.attn.qkv"))


def changed(form: Format, **more: Any) -> dict[str, Any]:
    return {**form.config, **more}


def group_with(form: Format, what: str, **more: Any) -> dict[str, Any]:
    group = form.config["config_groups"]["group_0"]
    return changed(form, config_groups={"group_0": {**group, what: {**(group[what] or {}), **more}}})


PACKED, WHOLE = compressed("pack-quantized", 4, "group"), INT8["w8a8, dynamic"]
WRONG = {
    "another method": {"quant_method": "fp8"},
    "3 bits": changed(gptq(4, symmetric=True), bits=3),
    "bits that are no integer": changed(gptq(4, symmetric=True), bits=4.0),
    "no targets": changed(
        PACKED, config_groups={"group_0": {**PACKED.config["config_groups"]["group_0"], "targets": []}}
    ),
    "marlin": changed(gptq(4, symmetric=True), checkpoint_format="marlin"),
    "an odd group": changed(gptq(4, symmetric=True), group_size=48),
    "a huge group": changed(awq(), group_size=32 * 10**30),
    "a group of true": changed(awq(), group_size=True),
    "gemv": changed(awq(), version="gemv"),
    "no zero points": changed(awq(), zero_point=False),
    "a list of overrides": changed(gptq(4, symmetric=True), dynamic=["a"]),
    "an override of 2 bits": changed(gptq(4, symmetric=True), dynamic={"+:.*up_proj": {"bits": 2}}),
    "a wrong expression": changed(gptq(4, symmetric=True), dynamic={"-:(": {}}),
    "no groups": changed(PACKED, config_groups={}),
    "floats": group_with(PACKED, "weights", type="float"),
    "another strategy": group_with(PACKED, "weights", strategy="block"),
    "no group size": group_with(PACKED, "weights", group_size=None),
    "4-bit activations": group_with(WHOLE, "input_activations", num_bits=4),
    "asymmetric activations": group_with(WHOLE, "input_activations", symmetric=False),
    "int8 activations with 4 bits": group_with(PACKED, "input_activations", num_bits=8, dynamic=True, strategy="token"),
    "keys and values": changed(PACKED, kv_cache_scheme={"num_bits": 8}),
    "modules that are no list": changed(awq(), modules_to_not_convert="lm_head"),
}


@pytest.mark.parametrize("case", WRONG)
def test_configs_that_are_not_implemented_are_refused(case: str) -> None:
    assert str(describe(WRONG[case], IntegerConfig())).startswith(("quantization_config", "["))


def test_scales_of_keys_and_values_may_be_declared_beside_integers() -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    assert read_format(changed(PACKED, kv_cache_scheme=scheme), IntegerConfig()) == read_format(
        PACKED.config, IntegerConfig()
    )


def test_modules_may_be_stored_otherwise() -> None:
    """Rules for modules are those of GPTQModel and compressed-tensors: the first one that matches."""
    overrides = {"-:.*k_proj": {}, r"+:.*\.1\..*up_proj": {"bits": 8, "group_size": -1}, ".*q_proj": {"group_size": 64}}
    form = read_format(changed(gptq(4, symmetric=True), dynamic=overrides), IntegerConfig())
    assert form.scheme_of(["model.layers.1.self_attn.k_proj"]) is None
    other = form.scheme_of(["model.layers.1.mlp.up_proj"])
    assert other is not None
    assert (other.bits, other.group) == (8, None)
    with pytest.raises(
        ConfigError, match=r"share a layer.* gptq of 4 bits with scales for each 32 columns of a row and zero"
    ):
        form.scheme_of(["model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"])
    with pytest.raises(ConfigError, match=r"leaves out .*k_proj"):
        form.scheme_of(["model.layers.0.self_attn.v_proj", "model.layers.0.self_attn.k_proj"])
    group = PACKED.config["config_groups"]["group_0"]
    wide = {**group, "targets": ["re:.*down_proj"], "weights": {**group["weights"], "num_bits": 8}}
    form = read_format(changed(PACKED, config_groups={"a": group, "b": wide}), IntegerConfig())
    found = [form.scheme_of([f"model.layers.0.mlp.{name}_proj"]) for name in ("up", "down")]
    assert [scheme.bits for scheme in found if scheme is not None] == [4, 8]
    form = read_format(
        changed(gptq(4, symmetric=True), modules_in_block_to_quantize=[["mlp.up_proj"]]), IntegerConfig()
    )
    assert form.scheme_of(["model.layers.0.mlp.up_proj"]) is not None
    assert form.scheme_of(["model.layers.0.self_attn.q_proj"]) is None


def test_heads_and_routers_are_quantized_only_if_the_checkpoint_says_so() -> None:
    for config, quantized in ((awq().config, False), (changed(gptq(4, symmetric=True), lm_head=True), True)):
        chosen = Integer(IntegerConfig(), QuantizationContext(config, torch.float32, CPU))
        head = LinearShape(("lm_head",), (64,), 64, precise=True)
        assert (chosen.method(head) is not None) == quantized
        assert chosen.method(LinearShape(("model.layers.0.mlp.gate",), (8,), 64, precise=True)) is None
    chosen = Integer(
        IntegerConfig(), QuantizationContext(changed(awq(), modules_to_not_convert=["self_attn"]), torch.float32, CPU)
    )
    assert chosen.method(LinearShape(("model.layers.3.self_attn.q_proj",), (64,), 64)) is None
    assert chosen.method(LinearShape(("model.layers.3.mlp.up_proj",), (64,), 64)) is not None


def test_sizes_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    chosen = Integer(IntegerConfig(), QuantizationContext(None, torch.float32, CPU))
    with pytest.raises(ConfigError, match=r"up_proj has 96 columns, which groups of 128"):
        chosen.method(LinearShape(("up_proj",), (64,), 96))
    with pytest.raises(ConfigError, match=r"down_proj has 64 columns on this rank.*parallel\.tp"):
        chosen.method(LinearShape(("down_proj",), (64,), 64, whole_inputs=128))
    write(tmp_path, awq())
    with pytest.raises((ConfigError, ResolutionError), match=r"quantization\.bits is set"):
        LLM(str(tmp_path), device="cpu", quantization={"kind": "integer", "bits": 8})
    assert "group_size: null" in str(describe(None, IntegerConfig(bits=8, activations="int8")))
    assert describe(None, IntegerConfig(bits=8, group_size=None, activations="int8")) is None
