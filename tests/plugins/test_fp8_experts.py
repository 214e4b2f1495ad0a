"""Test FP8 weights of experts: models against transformers, on one rank and on two, layouts of tensors of all experts, published
settings, and refusals.

Run: python -m pytest tests/plugins/test_fp8_experts.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dovetail import LLM, SamplingParams
from dovetail.engine.build import build_model
from dovetail.engine.weights import load_weights
from dovetail.errors import ConfigError, WeightsError
from dovetail.interfaces.mesh import SINGLE, Mesh
from dovetail.interfaces.model import WeightTarget
from dovetail.interfaces.quantization import ExpertWeightsShape, QuantizationContext
from dovetail.layers.expert_targets import FusedLayout
from dovetail.layers.experts import Experts
from dovetail.layers.transforms import Reshape
from dovetail.ops.expert_formats import dequantized
from dovetail.testing.quantized_experts import INFO, LayerOfExperts
from dovetail.testing.ranks import thread_meshes
from dovetail_models.moe import MoeModel
from dovetail_models.moe_describe import describe_qwen3_moe
from dovetail_quantization.config import Fp8Config
from dovetail_quantization.fp8 import Fp8
from dovetail_quantization.fp8_experts import Fp8Experts
from fp8_checkpoints import PROJECTION, by_block, quantized
from moe_suite import SMALL, randomise

FP8, CPU, BLOCK = torch.float8_e4m3fn, torch.device("cpu"), 32
BY_BLOCK = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": ["lm_head"]}
BY_ROW = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}
BY_TENSOR = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}
SIZES = SMALL | {"hidden_size": 64, "head_dim": 16, "num_key_value_heads": 4, "intermediate_size": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "q_lora_rank": 32,
        "kv_lora_rank": 48,
        "qk_nope_head_dim": 20,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
    },
}
"""Settings of models. Of latent attention, no size of a head divides the blocks, nor do those of the latent."""


def write(directory: Path, name: str, checkpoint: Mapping[str, Any] | None, **changes: Any) -> Any:
    """Write a random model in FP8 by block or, without a ``quantization_config``, unquantized; return transformers' model
    with the weights that Dovetail then computes with."""
    torch.manual_seed(0)
    sizes = {key: size for key, size in SIZES.items() if name != "deepseek_v3" or key != "head_dim"}
    built = transformers.AutoConfig.for_model(name, **sizes | CONFIGS[name] | changes)
    model = transformers.AutoModelForCausalLM.from_config(built, dtype=torch.float32)
    randomise(model)
    exact = directory / "exact"
    model.save_pretrained(exact)
    tensors = load_file(exact / "model.safetensors")
    if checkpoint is None:
        stored = dict(tensors)
        rows = {
            key: quantized(tensor, (1, tensor.shape[1])) for key, tensor in tensors.items() if PROJECTION.fullmatch(key)
        }
        tensors |= {key: made.exact for key, made in rows.items()}
    else:
        stored, tensors = by_block(tensors, BLOCK)
    save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items()}, exact / "model.safetensors", {"format": "pt"}
    )
    save_file({key: tensor.contiguous() for key, tensor in stored.items()}, directory / "model.safetensors")
    config = json.loads((exact / "config.json").read_text())
    config |= {} if checkpoint is None else {"quantization_config": checkpoint}
    (directory / "config.json").write_text(json.dumps(config))
    return transformers.AutoModelForCausalLM.from_pretrained(exact, attn_implementation="eager").eval()


@torch.inference_mode()
def compare(directory: Path, model: Any, **sections: Any) -> None:
    """Compare the log-probabilities of greedy outputs with those of transformers."""
    sections = {
        "memory": {"page_size": 8, "num_pages": 60},
        "threads": 1,
        "device": "cpu",
        "grammar": "none",
    } | sections
    llm = LLM(str(directory), **sections)
    try:
        prompts = [[5, 17, 3], list(range(40)), [7] * 20]
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=8, temperature=0, logprobs=3, ignore_eos=True))
    finally:
        llm.close()
    for prompt, output in zip(prompts, outputs, strict=True):
        given = prompt + list(output.token_ids)
        expected = model(torch.tensor([given])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        assert list(output.token_ids) == expected.argmax(-1).tolist()
        got = [entry.logprob for entry in output.logprobs]
        assert got == pytest.approx(expected.max(-1).values.tolist(), abs=1e-4)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Write Qwen3-MoE in FP8 by block."""
    directory = tmp_path_factory.mktemp("qwen3-fp8")
    return directory, write(directory, "qwen3_moe", BY_BLOCK)


def test_a_checkpoint_by_block_in_the_engine(published: tuple[Path, Any]) -> None:
    compare(*published, scheduler={"chunk_size": 16})


@pytest.mark.parametrize("experts", [pytest.param("tp", marks=pytest.mark.full), "ep"])
def test_two_ranks_divide_a_checkpoint_by_block(published: tuple[Path, Any], experts: str) -> None:
    compare(*published, parallel={"tp": 2, "experts": experts})


def test_mixtral_by_block(tmp_path: Path) -> None:
    compare(tmp_path, write(tmp_path, "mixtral", BY_BLOCK))


@pytest.mark.parametrize("sizes", [{}, {"q_lora_rank": None, "qk_nope_head_dim": 24}], ids=["low rank", "one product"])
def test_latent_attention_by_block(tmp_path: Path, sizes: dict[str, Any]) -> None:
    """The expansion of latents, which is stored by block too, is absorbed into queries and values."""
    compare(tmp_path, write(tmp_path, "deepseek_v3", BY_BLOCK, **sizes), scheduler={"chunk_size": 16})


@pytest.mark.full
def test_two_ranks_divide_latent_attention_by_block(tmp_path: Path) -> None:
    sizes = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 48}
    compare(tmp_path, write(tmp_path, "deepseek_v3", BY_BLOCK, **sizes), parallel={"tp": 2})


@pytest.mark.parametrize("name", CONFIGS)
def test_an_unquantized_checkpoint_is_quantized_while_it_is_loaded(tmp_path: Path, name: str) -> None:
    compare(tmp_path, write(tmp_path, name, None), quantization="fp8")


def test_wrong_tensors_are_named(published: tuple[Path, Any], tmp_path: Path) -> None:
    directory, _ = published
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    tensors, scale = load_file(directory / "model.safetensors"), "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"
    codes = scale.removesuffix("_scale_inv")
    for change, message in (
        ({scale: None}, scale),
        ({codes: tensors[codes].float()}, rf"{re.escape(codes)} is torch\.float32; supported: torch\.float8_e4m3fn"),
        ({scale: tensors[scale][:1]}, scale),
        (
            {scale: tensors[scale] * float("nan")},
            rf"tensor {re.escape(scale)} has FP8 scales that are not finite",
        ),
        (
            {codes: tensors[codes].clone().view(torch.uint8).fill_(127).view(torch.float8_e4m3fn)},
            rf"tensor {re.escape(codes)} has FP8 codes that are NaN",
        ),
    ):
        found = {**tensors, **change}
        save_file({key: tensor for key, tensor in found.items() if tensor is not None}, tmp_path / "model.safetensors")
        with pytest.raises(WeightsError, match=message):
            compare(tmp_path, None)


LAYOUTS = {
    "plain": FusedLayout(),
    "up first": FusedLayout(up_first=True),
    "transposed": FusedLayout(transposed=True),
    "transposed, up first": FusedLayout(transposed=True, up_first=True),
    "interleaved": FusedLayout(interleaved=True),
    "gpt-oss": FusedLayout(transposed=True, interleaved=True),
}


def in_layout(tensor: torch.Tensor, layout: FusedLayout, halves: bool) -> torch.Tensor:
    """Return what belongs to the rows of weights of all experts, ``[experts, rows, columns]``, as a layout has it."""
    if halves:
        pair = list(tensor.chunk(2, 1))
        pair = pair[::-1] if layout.up_first else pair
        tensor = torch.stack(pair, 2).flatten(1, 2) if layout.interleaved else torch.cat(pair, 1)
    return (tensor.mT if layout.transposed else tensor).contiguous()


@pytest.mark.parametrize("divided", ["one", "tp", "ep"])
@pytest.mark.parametrize("name", ["rows", "blocks", "tensor"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_reads_its_part_of_every_layout(tmp_path: Path, layout: str, name: str, divided: Any) -> None:
    checkpoint = {"rows": BY_ROW, "blocks": BY_BLOCK, "tensor": BY_TENSOR}[name]
    torch.manual_seed(0)
    own, exact = LAYOUTS[layout], dict[str, torch.Tensor]()
    tensors = {"body.router.weight": torch.randn(4, 64)}
    for projection, rows, columns in (("gate_up", 256, 64), ("down", 64, 128)):
        key, halves = f"body.experts.{projection}_proj", projection == "gate_up"
        blocks = {"rows": (1, columns), "blocks": (BLOCK, BLOCK), "tensor": (128 if halves else 64, columns)}
        made = quantized(torch.randn(4, rows, columns), blocks[name])
        scale = in_layout(made.scale, own if name == "blocks" or halves else FusedLayout(), halves)
        if name == "tensor":  # always [experts, projections, 1]
            scale = in_layout(made.scale, FusedLayout(up_first=own.up_first), halves)
        tensors[key], exact[projection] = in_layout(made.codes, own, halves), made.exact
        tensors[f"{key}_{'scale_inv' if name == 'blocks' else 'scale'}"] = scale
        tensors[f"{key}_bias"] = torch.zeros(4, rows)
    save_file(tensors, tmp_path / "model.safetensors")
    meshes = [SINGLE] if divided == "one" else thread_meshes(2, divided)
    if (own.interleaved and name == "blocks") or ((own.interleaved or own.transposed) and name == "tensor"):
        with pytest.raises(
            ConfigError, match=r"body\.experts\.gate_up_proj (has rows of gate and up in turn|is stored as)"
        ):
            load_layer(tmp_path, own, meshes[0], checkpoint)
        return
    for rank, mesh in enumerate(meshes):
        weights = dequantized(load_layer(tmp_path, own, mesh, checkpoint).weights, torch.float32)
        held = slice(2 * rank, 2 * rank + 2) if divided == "ep" else slice(None)
        part = slice(64 * rank, 64 * rank + 64) if divided == "tp" else slice(None)
        gate, up = exact["gate_up"][held].chunk(2, 1)
        assert weights.gate_up.equal(torch.cat([gate[:, part], up[:, part]], 1))
        assert weights.down.equal(exact["down"][held, :, part])


def load_layer(directory: Path, layout: FusedLayout, mesh: Mesh, checkpoint: Mapping[str, Any]) -> Experts:
    quantization = Fp8(Fp8Config(), QuantizationContext(checkpoint, torch.float32, CPU))
    model = build_model(LayerOfExperts, replace(INFO, config=layout), CPU, torch.float32, mesh, quantization)
    load_weights(model, directory)
    assert isinstance(model, LayerOfExperts)
    return model.experts


def method(checkpoint: Mapping[str, Any], size: int = 64, device: str = "cpu") -> Fp8Experts | None:
    names = ("experts.0.gate_proj", "experts.0.up_proj", "experts.0.down_proj")
    context = QuantizationContext(checkpoint, torch.bfloat16, torch.device(device))
    found = Fp8(Fp8Config(), context).experts_method(ExpertWeightsShape(names, 1, 64, size))
    assert found is None or isinstance(found, Fp8Experts)
    return found


def test_what_is_not_possible_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"48 rows on this rank.*blocks of 32.*parallel\.experts: ep"):
        method(BY_BLOCK, 48)
    for columns in (16, 256):
        with pytest.raises(ConfigError, match=rf"blocks of {columns} columns; .* on CUDA: 32 to 128"):
            method(BY_BLOCK | {"weight_block_size": [16, columns]}, device="cuda")
    static = method(BY_TENSOR | {"activation_scheme": "static"})
    assert static is not None
    fused = WeightTarget("down", transform=Reshape((1, 64, 64)))
    with pytest.raises(ConfigError, match=r"static scales of activations; implemented with these"):
        list(static.targets("experts.down_proj", fused))


def test_layers_that_are_left_out() -> None:
    assert method(BY_BLOCK | {"modules_to_not_convert": ["lm_head", "experts"]}) is None
    with pytest.raises(ConfigError, match=r"leaves out experts\.0\.up_proj, but not the other modules"):
        method(BY_BLOCK | {"modules_to_not_convert": ["experts.0.up_proj"]})


def test_the_published_settings_of_qwen3() -> None:
    """Every layer's experts are quantized, and no router is. As published, the list names all norms and routers."""
    layers = 48
    listed = [
        f"model.layers.{i}.{name}"
        for i in range(layers)
        for name in ("input_layernorm", "mlp.gate", "post_attention_layernorm")
    ]
    given = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", *listed],
    }
    sizes = {"num_hidden_layers": 3, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "hidden_size": 2048}
    config = SMALL | sizes | heads | {"architectures": ["Qwen3MoeForCausalLM"]}
    quantization = Fp8(Fp8Config(), QuantizationContext(given, torch.bfloat16, torch.device("meta")))
    model = build_model(
        MoeModel, describe_qwen3_moe(config), torch.device("meta"), torch.bfloat16, SINGLE, quantization
    )
    assert isinstance(model, MoeModel)
    for layer in model.layers:
        assert isinstance(layer.mlp, Experts)
        shapes = {name: (tuple(p.shape), p.dtype) for name, p in layer.mlp.named_parameters(recurse=False)}
        assert shapes == {
            "gate_up": ((128 * 2 * 768, 2048), FP8),
            "gate_up_scale": ((128 * 12, 16), torch.float32),
            "down": ((128 * 2048, 768), FP8),
            "down_scale": ((128 * 16, 6), torch.float32),
        }
        assert layer.mlp.router.gate.method is None
