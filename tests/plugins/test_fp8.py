"""Test FP8 weights: every format of checkpoints, quantization while loading, ranks, and refusals.

Run: python -m pytest tests/plugins/test_fp8.py
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.quantizers.quantizers_utils import should_convert_module

from dovetail import LLM, SamplingParams
from dovetail.engine.build import as_module, build_model
from dovetail.engine.weights import load_weights
from dovetail.errors import ConfigError, ResolutionError, WeightsError
from dovetail.interfaces.mesh import SINGLE, Mesh
from dovetail.interfaces.model import ModelArchitecture, WeightTarget
from dovetail.interfaces.quantization import LinearProduct, LinearShape, ParameterShape, QuantizationContext
from dovetail.layers.linear import Linear
from dovetail.testing.quantization import QuantizationSuite
from dovetail.testing.ranks import thread_meshes
from dovetail_models.dense import DenseModel
from dovetail_models.dense_describe import describe_llama
from dovetail_quantization import plugin
from dovetail_quantization.config import Fp8Config
from dovetail_quantization.fp8 import Fp8, Fp8Linear
from dovetail_quantization.fp8_formats import Activations, Scales, describe, read_format

FP8 = torch.float8_e4m3fn
CPU = torch.device("cpu")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
}
PROJECTION = re.compile(r"(model\.layers\.\d+\..*_proj)\.weight")
LEFT_OUT = "model.layers.1.mlp.down_proj"
BLOCK = 32


def dense_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG, initializer_range=0.2))
    return {name: t.detach() + 0.1 * torch.randn_like(t) * (t.ndim == 1) for name, t in model.state_dict().items()}


def rounded(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (weight / scale).clamp(-448, 448).to(FP8)


def by_tensor(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scale = weight.abs().max() / 448
    return rounded(weight, scale), scale, rounded(weight, scale).float() * scale


def by_row(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return rounded(weight, scale), scale, rounded(weight, scale).float() * scale


def by_block(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, columns = (size // BLOCK for size in weight.shape)
    blocks = weight.view(rows, BLOCK, columns, BLOCK)
    scale = blocks.abs().amax((1, 3)) / 448
    stored = rounded(blocks, scale[:, None, :, None])
    return stored.view(weight.shape), scale, (stored.float() * scale[:, None, :, None]).view(weight.shape)


def compressed(strategy: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**numbers, "strategy": strategy, "dynamic": False}
    if strategy == "block":
        weights["block_structure"] = [BLOCK, BLOCK]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {**numbers, **inputs}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "body.router", rf"re:{re.escape(LEFT_OUT)}$"],
    }


Quantize = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
TOKEN, STATIC = {"strategy": "token", "dynamic": True}, {"strategy": "tensor", "dynamic": False}
FORMATS: dict[str, tuple[dict[str, Any], Quantize, str]] = {
    "fp8 by tensor": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head", LEFT_OUT]},
        by_tensor,
        "weight_scale",
    ),
    "fp8 by tensor, static": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": [LEFT_OUT, "lm_head"]},
        by_tensor,
        "weight_scale",
    ),
    "fp8 by block": (
        {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": ["lm_head", LEFT_OUT]},
        by_block,
        "weight_scale_inv",
    ),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head", LEFT_OUT]},
        by_row,
        "weight_scale",
    ),
    "compressed by row": (compressed("channel", TOKEN), by_row, "weight_scale"),
    "compressed by tensor, static": (compressed("tensor", STATIC), by_tensor, "weight_scale"),
    "compressed by block": (compressed("block", {"strategy": "group", "dynamic": True}), by_block, "weight_scale"),
}


def write(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")


def write_quantized(directory: Path, name: str) -> dict[str, torch.Tensor]:
    """Write a checkpoint in a format, and return the dense tensors that it stands for."""
    checkpoint, quantize, suffix = FORMATS[name]
    stored, exact = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for key, tensor in dense_tensors().items():
        found = PROJECTION.fullmatch(key)
        if found is None or found[1] == LEFT_OUT:
            stored[key] = exact[key] = tensor
            continue
        stored[key], scale, exact[key] = quantize(tensor)
        stored[f"{found[1]}.{suffix}"] = scale
        if "static" in name:
            stored[f"{found[1]}.input_scale"] = torch.tensor(0.02)
    write(directory, {**CONFIG, "quantization_config": checkpoint}, stored)
    return exact


def load(directory: Path, config: Fp8Config | None, mesh: Mesh = SINGLE, *, load_format: str = "safetensors") -> Any:
    """Return the checkpoint's model; with ``config``, FP8."""
    given = json.loads((directory / "config.json").read_text())
    context = QuantizationContext(given.get("quantization_config"), torch.float32, CPU)
    quantization = None if config is None else Fp8(config, context)
    model = build_model(DenseModel, describe_llama(given), CPU, torch.float32, mesh, quantization)
    for parameter in as_module(model).parameters():
        parameter.view(torch.uint8).fill_(255)  # NaN in every dtype
    load_weights(model, directory, load_format)
    return model


def weights(model: ModelArchitecture) -> dict[str, torch.Tensor]:
    """Return what the linear layers of a model multiply with."""
    layers = {name: m for name, m in as_module(model).named_modules() if isinstance(m, Linear)}
    found = {}
    for name, layer in layers.items():
        eye = torch.eye(layer.in_features)
        found[name] = layer.product.forward(eye, None).T
    return found


class TestFp8(QuantizationSuite):
    name = "fp8"
    checkpoints: ClassVar = {"while loading": None, **{name: config for name, (config, _, _) in FORMATS.items()}}

    def store(
        self, checkpoint: Mapping[str, Any], module: str, weight: torch.Tensor
    ) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        (quantize, suffix), *_ = [(q, suffix) for config, q, suffix in FORMATS.values() if config is checkpoint]
        stored, scale, exact = quantize(weight)
        extra = {f"{module}.input_scale": torch.tensor(0.02)} if _is_static(checkpoint) else {}
        return {f"{module}.weight": stored, f"{module}.{suffix}": scale, **extra}, exact

    def store_experts(
        self, checkpoint: Mapping[str, Any], name: str, weight: torch.Tensor
    ) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        if _is_static(checkpoint):
            pytest.skip("refused: static scales of activations beside tensors of all experts")
        (quantize, suffix), *_ = [(q, suffix) for config, q, suffix in FORMATS.values() if config is checkpoint]
        projections = 2 if "gate_up" in name else 1
        made = [[quantize(part) for part in expert.chunk(projections)] for expert in weight]
        stored, scale, exact = (
            torch.stack(
                [
                    torch.cat([one[i].reshape(-1, one[i].shape[-1] if one[i].ndim else 1) for one in parts])
                    for parts in made
                ]
            )
            for i in range(3)
        )
        return {name: stored, f"{name}_{suffix.removeprefix('weight_')}": scale}, exact


def _is_static(checkpoint: Mapping[str, Any]) -> bool:
    return "static" in str(checkpoint.get("activation_scheme")) or STATIC.items() <= _inputs(checkpoint).items()


def _inputs(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    return checkpoint.get("config_groups", {}).get("group_0", {}).get("input_activations", {})


@pytest.mark.parametrize("name", FORMATS)
def test_modules_that_the_checkpoint_leaves_out_stay_as_they_are(tmp_path: Path, name: str) -> None:
    exact = write_quantized(tmp_path, name)
    model = load(tmp_path, Fp8Config())
    assert model.layers[0].attn.qkv.weight.dtype == FP8
    assert model.layers[1].mlp.down.weight.equal(exact[f"{LEFT_OUT}.weight"])
    assert model.head.weight.equal(exact["lm_head.weight"])


@pytest.mark.parametrize("size", [1, 2])
def test_weights_are_quantized_while_they_are_loaded(tmp_path: Path, size: int) -> None:
    tensors = dense_tensors()
    tensors["model.layers.0.mlp.up_proj.weight"][3] = 0
    write(tmp_path, CONFIG, tensors)
    for mesh in thread_meshes(size) if size > 1 else [SINGLE]:
        model = load(tmp_path, Fp8Config(ignore=(r".*\.1\.mlp\.down_proj",)), mesh)
        got, exact = weights(model), weights(load(tmp_path, None, mesh))
        assert got.keys() == exact.keys()
        for name, weight in exact.items():
            kept = name in ("head", "layers.1.mlp.down")
            assert (model.get_submodule(name).weight.dtype == FP8) != kept
            step = weight.abs().amax(1, keepdim=True) / 448 / 2**10  # half of the smallest step of E4M3
            bound = torch.zeros(()) if kept else torch.maximum(weight.abs() / 2**4, step) * (1 + 1e-5)
            assert ((got[name] - weight).abs() <= bound).all(), name
            assert kept or not got[name].equal(weight)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_not_quantized(tmp_path: Path, value: float) -> None:
    tensors = dense_tensors()
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = value
    write(tmp_path, CONFIG, tensors)
    with pytest.raises(
        WeightsError, match=r"model\.layers\.0\.mlp\.up_proj\.weight has numbers that are infinite or NaN"
    ):
        weights(load(tmp_path, Fp8Config()))


def test_blocks_are_those_of_transformers(tmp_path: Path) -> None:
    """transformers dequantizes a checkpoint with blocks to the same weights."""
    pytest.importorskip("accelerate", reason="transformers needs accelerate to read FP8")
    write_quantized(tmp_path, "fp8 by block")
    given = transformers.FineGrainedFP8Config(
        dequantize=True, weight_block_size=(BLOCK, BLOCK), modules_to_not_convert=["lm_head", LEFT_OUT]
    )
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=given
    )
    expected = weights(load(tmp_path, Fp8Config()))
    got = dict(reference.named_parameters())
    for name, parts in {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}.items():
        whole = torch.cat([got[f"model.layers.0.{name}.{part}.weight"] for part in parts])
        torch.testing.assert_close(whole, expected[f"layers.0.{'attn.qkv' if name == 'self_attn' else 'mlp.gate_up'}"])


def test_a_layer_is_quantized_whole_or_not_at_all() -> None:
    context = QuantizationContext(None, torch.float32, CPU)
    chosen = Fp8(Fp8Config(ignore=(".*q_proj",)), context)
    shape = LinearShape(("a.q_proj", "a.k_proj"), (4, 4), 8)
    with pytest.raises(ConfigError, match=r"leaves out a\.q_proj, but not .*a\.k_proj"):
        chosen.method(shape)
    assert chosen.method(LinearShape(("a.q_proj",), (4,), 8)) is None
    assert chosen.method(LinearShape(("lm_head",), (4,), 8, precise=True)) is None


@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8"])
def test_the_head_is_not_quantized_if_no_list_names_it(method: str) -> None:
    chosen = Fp8(Fp8Config(), QuantizationContext({"quant_method": method}, torch.float32, CPU))
    assert chosen.method(LinearShape(("lm_head",), (4,), 8, precise=True)) is None
    assert chosen.method(LinearShape(("a.q_proj",), (4,), 8)) is not None


def test_blocks_that_ranks_would_cut_are_refused(tmp_path: Path) -> None:
    checkpoint = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    chosen = Fp8(Fp8Config(), QuantizationContext(checkpoint, torch.float32, CPU))
    with pytest.raises(ConfigError, match=r"k_proj has 32 rows.*parallel\.tp"):
        chosen.method(LinearShape(("q_proj", "k_proj", "v_proj"), (64, 32, 32), 128))


WRONG = {
    "another method": {"quant_method": "awq"},
    "bound": {"quant_method": "fbgemm_fp8", "activation_scale_ub": "1200"},
    "another format": {"quant_method": "fp8", "fmt": "e5m2"},
    "static blocks": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
    "odd blocks": {"quant_method": "fp8", "weight_block_size": [100, 128]},
    "a bound beyond floats": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 10**400},
    "huge rows of blocks": {"quant_method": "fp8", "weight_block_size": [16 * 10**30, 16]},
    "huge columns of blocks": {"quant_method": "fp8", "weight_block_size": [16, 2**62]},
    "dynamic weights": {
        **compressed("channel", TOKEN),
        "config_groups": {
            "g": compressed("channel", TOKEN)["config_groups"]["group_0"]
            | {"weights": {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": True}}
        },
    },
    "columns of blocks": {"quant_method": "fp8", "weight_block_size": [128, 48]},
    "groups of another size": compressed("block", {"strategy": "group", "dynamic": True, "group_size": 2 * BLOCK}),
    "scales of keys and values": {"quant_method": "fp8", "kv_cache_scheme": "dynamic"},
    "packed": {**compressed("channel", TOKEN), "format": "pack-quantized"},
    "no activations": {
        **compressed("channel", TOKEN),
        "config_groups": {"g": {"targets": ["Linear"], "weights": {}, "input_activations": None}},
    },
    "kv cache": {**compressed("channel", TOKEN), "kv_cache_scheme": {"num_bits": 8}},
    "groups": {**compressed("channel", TOKEN), "config_groups": {}},
    "embeddings": {"quant_method": "fp8", "modules_to_convert": ["model.embed_tokens"]},
    "names": {"quant_method": "fp8", "ignored_layers": "lm_head"},
    "a list of methods": {"quant_method": ["fp8"]},
    "a group without keys": {**compressed("channel", TOKEN), "config_groups": {"g": None}},
    "weights without keys": {
        **compressed("channel", TOKEN),
        "config_groups": {"g": {"targets": ["Linear"], "weights": "float", "input_activations": TOKEN}},
    },
    "inputs of which some are dynamic": compressed("tensor", {"strategy": "tensor", "dynamic": "local"}),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_implemented_is_named(name: str) -> None:
    reason = describe(WRONG[name], Fp8Config())
    assert reason is not None
    assert "quantization_config" in reason
    assert "implemented" in reason or "allowed" in reason


MODULES = (
    "lm_head",
    "model.layers.1",
    "model.layers.1.mlp.down_proj",
    "model.layers.1.mlp.gate",
    "model.layers.1.mlp.gate_proj",
    "model.layers.1.self_attn.q_proj",
    "model.layers.11.mlp.shared_expert_gate",
    "model.layers.11.self_attn.o_proj",
    "model.layers.2.mlp.experts.11.down_proj",
)


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
@pytest.mark.parametrize(
    "names",
    [
        [],
        ["lm_head"],
        ["model.layers.1"],
        ["mlp.gate"],
        ["gate"],
        ["self_attn"],
        ["layers.1."],
        ["model.layers.1."],
        ["model.layers.*.mlp"],
        [r"model\.layers\.(1|2)\..*_proj"],
        ["model.layers.1.mlp.gate|lm", "o_proj"],
        [".*self_attn", "(model).layers.2.mlp"],
        ["1.mlp.down_proj"],
        ["model.layers.1.mlp.gate_pro"],
        ["model.+gate", "mlp.*"],
        ["^lm_head$", "^model$"],
    ],
    ids=str,
)
def test_lists_of_modules_are_read_as_transformers_reads_them(key: str, names: list[str]) -> None:
    ignored = read_format({"quant_method": "fp8", key: names}, Fp8Config()).ignored
    found = [name for name in MODULES if ignored.fullmatch(name)]
    assert found == [name for name in MODULES if not should_convert_module(name, names)]


def test_expressions_of_modules_are_compared_with_the_beginning_of_a_name() -> None:
    with pytest.raises(ConfigError, match=r"wrong regular expression: nothing to repeat"):
        read_format({"quant_method": "fp8", "modules_to_not_convert": ["*.gate"]}, Fp8Config())
    given = {**compressed("channel", TOKEN), "ignore": [r"re:model\.layers\.0\.", "lm_head", "re:.*gate$"]}
    ignored = read_format(given, Fp8Config()).ignored
    assert all(map(ignored.fullmatch, ("model.layers.0.mlp.up_proj", "lm_head", "model.layers.1.mlp.gate")))
    assert not any(map(ignored.fullmatch, ("model.layers.1.mlp.gate_proj", "lm_head_2", "model.layers.10.mlp.up_proj")))
    read = read_format(None, Fp8Config())
    assert (read.scales, read.activations, read.online) == (Scales.ROW, Activations.TOKEN, True)


class RenamedLinear(Fp8Linear):
    """Name the parameters otherwise, as formats of other tools do."""

    names: ClassVar = {"weight": "qweight", "weight_scale": "scales"}

    def parameters(self) -> Mapping[str, ParameterShape]:
        return {self.names[name]: shape for name, shape in super().parameters().items()}

    def targets(self, name: str, weight: WeightTarget) -> Iterator[tuple[str, WeightTarget]]:
        for tensor, target in super().targets(name, weight):
            yield tensor, target._replace(parameter=self.names[target.parameter])

    def prepare(self, parameters: Mapping[str, torch.Tensor]) -> LinearProduct:
        return super().prepare({name: parameters[own] for name, own in self.names.items()})


def test_parameters_of_a_method_may_have_any_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, CONFIG, dense_tensors())
    expected = weights(load(tmp_path, Fp8Config()))
    monkeypatch.setattr("dovetail_quantization.fp8.Fp8Linear", RenamedLinear)
    model = load(tmp_path, Fp8Config())
    assert not hasattr(model.layers[0].mlp.down, "weight")
    got = weights(model)
    assert all(got[name].equal(weight) for name, weight in expected.items())


def test_auto_follows_the_checkpoint(tmp_path: Path) -> None:
    exact = write_quantized(tmp_path, "compressed by row")
    params, prompt = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True), list(range(5, 25))
    with LLM(tmp_path, threads=1) as llm:
        assert llm.resolved.resolution("quantization").chosen == "fp8"
        (got,) = llm.generate([prompt], params)
    with pytest.raises(ResolutionError, match=r"quantization is none.*compressed-tensors"):
        LLM(tmp_path, quantization="none")
    write(tmp_path, CONFIG, exact)
    with LLM(tmp_path, threads=1) as llm:
        assert llm.resolved.resolution("quantization").chosen is None
        assert llm.generate([prompt], params)[0].token_ids == got.token_ids


def test_an_unknown_method_is_refused_with_what_is_known(tmp_path: Path) -> None:
    write(tmp_path, {**CONFIG, "quantization_config": {"quant_method": "mystery"}}, dense_tensors())
    reason = r"(?s)quantization is none because no component.*\n.*fp8.*quant_method is 'mystery'; implemented: 'fp8'"
    with pytest.raises(ResolutionError, match=reason):
        LLM(tmp_path)
    with pytest.raises(ResolutionError, match=r"quant_method 'mystery'") as found:
        LLM(tmp_path, quantization="none")
    assert "because" not in str(found.value)
    with pytest.raises(ResolutionError, match=r"quant_method is 'mystery'; implemented: 'fp8'"):
        LLM(tmp_path, quantization="fp8")


def test_a_describe_that_raises_rejects_its_component(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(checkpoint: object, config: object) -> None:
        raise KeyError("bits")

    write_quantized(tmp_path, "fp8 by block")
    monkeypatch.setattr("dovetail_quantization.fp8_formats.describe", fail)
    with pytest.raises(ResolutionError, match=r"fp8_formats:describe raised KeyError: 'bits'"):
        LLM(tmp_path, quantization="fp8")


def test_a_tensor_of_another_dtype_is_named(tmp_path: Path) -> None:
    write_quantized(tmp_path, "fp8 by block")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].float()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=rf"{re.escape(name)} is torch.float32; supported: torch.float8_e4m3fn"):
        load(tmp_path, Fp8Config())


@pytest.fixture(scope="module")
def answers() -> Iterator[Callable[[str], str]]:
    with LLM("tiny", quantization="fp8", threads=1) as llm:
        params = SamplingParams(temperature=0, max_new_tokens=24)
        yield lambda text: llm.chat([{"role": "user", "content": text}], params).text


def test_a_quantized_model_still_answers(answers: Callable[[str], str]) -> None:
    assert answers("What is the capital of France?") == "The capital of France is Paris."


def test_a_quantization_without_experts_is_refused_for_models_with_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dovetail_quantization.plugin.FP8", dataclasses.replace(plugin.FP8, offers=frozenset()))
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = {**CONFIG, **sizes, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    del config["attention_bias"]
    write(tmp_path, config, {"x": torch.zeros(1)})
    with pytest.raises(ResolutionError, match=r"Qwen3MoeForCausalLM' needs quantization\.experts"):
        LLM(tmp_path, quantization="fp8")
