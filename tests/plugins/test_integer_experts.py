"""Test integer weights of experts: models against transformers with the dequantized weights, on one rank and on two, and
refusals. ``test_integer.py`` runs the conformance suite.

Run: python -m pytest tests/plugins/test_integer_experts.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dovetail import LLM, SamplingParams
from dovetail.errors import ConfigError, WeightsError
from dovetail.interfaces.quantization import ExpertWeightsShape, QuantizationContext
from dovetail_quantization.config import IntegerConfig
from dovetail_quantization.integer import Integer
from dovetail_quantization.integer_formats import expert_format
from integer_checkpoints import FORMATS, INT8, gptq
from moe_suite import SMALL, randomise

PROJECTION = re.compile(r"(.*(_proj|experts\.\d+\.w\d))\.weight")
SIZES = SMALL | {"hidden_size": 64, "head_dim": 16, "num_key_value_heads": 4, "intermediate_size": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def write(directory: Path, name: str, form: str) -> Any:
    """Write a random model in a format, and return transformers' model with the weights that the checkpoint stands for."""
    torch.manual_seed(0)
    built = transformers.AutoConfig.for_model(name, **SIZES | CONFIGS[name])
    model = transformers.AutoModelForCausalLM.from_config(built, dtype=torch.float32)
    randomise(model)
    exact = directory / "exact"
    model.save_pretrained(exact)
    tensors = load_file(exact / "model.safetensors")
    stored = dict(tensors)
    left_out = "model.layers.1.mlp.down_proj"
    for key in [key for key in tensors if PROJECTION.fullmatch(key) and left_out not in key]:
        del stored[key]
        made, tensors[key] = FORMATS[form].store(key.removesuffix(".weight"), tensors[key])
        stored |= made
    save_file(tensors, exact / "model.safetensors", {"format": "pt"})
    save_file({key: tensor.contiguous() for key, tensor in stored.items()}, directory / "model.safetensors")
    config = json.loads((exact / "config.json").read_text()) | {"quantization_config": FORMATS[form].config}
    (directory / "config.json").write_text(json.dumps(config))
    return transformers.AutoModelForCausalLM.from_pretrained(exact, attn_implementation="eager").eval()


@torch.inference_mode()
def compare(directory: Path, model: Any, **sections: Any) -> None:
    """Compare the log-probabilities of greedy outputs with those of transformers."""
    memory = {"page_size": 8, "num_pages": 60}
    llm = LLM(str(directory), memory=memory, threads=1, device="cpu", grammar="none", **sections)
    try:
        prompts = [[5, 17, 3], list(range(40))]
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=6, temperature=0, logprobs=3, ignore_eos=True))
    finally:
        llm.close()
    for prompt, output in zip(prompts, outputs, strict=True):
        given = prompt + list(output.token_ids)
        expected = model(torch.tensor([given])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        assert list(output.token_ids) == expected.argmax(-1).tolist()
        got = [entry.logprob for entry in output.logprobs]
        assert got == pytest.approx(expected.max(-1).values.tolist(), abs=1e-4)


full = pytest.mark.full


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("qwen3_moe", "awq"),
        ("mixtral", "gptq, 4 bits"),
        *(pytest.param("qwen3_moe", form, marks=full) for form in ("packed, asymmetric", "gptq, 8 bits, by row, v2")),
        pytest.param("qwen3_moe", "int8, tensor", marks=full),
        pytest.param("mixtral", "awq", marks=full),
    ],
)
def test_models_compute_with_the_weights_of_the_checkpoint(tmp_path: Path, name: str, form: str) -> None:
    compare(tmp_path, write(tmp_path, name, form))


@pytest.mark.parametrize("experts", ["tp", pytest.param("ep", marks=full)])
@full
def test_two_ranks_divide_a_checkpoint(tmp_path: Path, experts: str) -> None:
    compare(tmp_path, write(tmp_path, "qwen3_moe", "packed, asymmetric"), parallel={"tp": 2, "experts": experts})


def chosen(config: dict[str, Any], size: int = 64) -> Any:
    names = ("experts.0.gate_proj", "experts.0.up_proj", "experts.0.down_proj")
    context = QuantizationContext(config, torch.float32, torch.device("cpu"))
    return Integer(IntegerConfig(), context).experts_method(ExpertWeightsShape(names, 1, 64, size))


def test_what_is_not_possible_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"experts\.0\.gate_proj is an expert .* with act-order"):
        chosen(FORMATS["gptq, act-order"].config)
    with pytest.raises(
        ConfigError, match=r"48 intermediate values on this rank, which groups of 32.*parallel\.experts: ep"
    ):
        chosen(FORMATS["awq"].config, 48)
    write(tmp_path, "mixtral", "gptq, 4 bits")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.2.w2.g_idx"
    save_file(tensors | {name: tensors[name].flip(0).contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=rf"{re.escape(name)} lists groups of columns in another order"):
        LLM(str(tmp_path), device="cpu", grammar="none", threads=1)


def test_experts_are_stored_in_the_format_that_the_checkpoint_says() -> None:
    assert expert_format(FORMATS["awq"].config, IntegerConfig()) == "int4"
    assert expert_format(INT8["w8a8, static"].config, IntegerConfig()) == "int8"
    left_out = {**gptq(4, symmetric=True).config, "dynamic": {"-:experts": {}}}
    assert chosen(left_out) is None
