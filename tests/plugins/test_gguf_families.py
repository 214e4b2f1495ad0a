"""Test models from GGUF files against transformers: checkpoints of transformers, converted as llama.cpp does.

Run: python -m pytest tests/plugins/test_gguf_families.py
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.config.checkpoint import locate
from dovetail.engine.weights import load_weights
from dovetail.gguf.directory import is_gguf_directory
from dovetail.gguf.families import FAMILIES
from hf_suite import SMALL, HuggingFaceSuite, rope
from moe_suite import SMALL as SMALL_MOE
from moe_suite import randomise

pytest.importorskip("gguf", reason="the package gguf is not installed (pip install 'dovetail[test]')")
from gguf_convert import convert

MOE = {key: value for key, value in SMALL_MOE.items() if key != "head_dim"}
SIZES = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "head_dim": 4,
    "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4, **SIZES,
}  # fmt: skip
LATENT_KEYS = {"attention.key_length_mla": 12, "attention.value_length_mla": 6, "rope.dimension_count": 4}
WINDOWS = {"sliding_window": 7, "num_hidden_layers": 2}

CASES: dict[str, tuple[str, str, Mapping[str, Any], Mapping[str, Any]]] = {
    "llama": ("llama", "llama", SMALL, {}),
    "llama with biases": ("llama", "llama", SMALL | {"attention_bias": True, "tie_word_embeddings": True}, {}),
    "mixtral": ("llama", "mixtral", MOE | {"num_local_experts": 4, "num_experts_per_tok": 2}, {}),
    "gemma": ("gemma", "gemma", SMALL, {}),
    "gemma2": ("gemma2", "gemma2", SMALL | WINDOWS | {"query_pre_attn_scalar": 12}, {}),
    "gemma3": (
        "gemma3",
        "gemma3_text",
        SMALL | {"query_pre_attn_scalar": 12, "sliding_window": 7, "num_hidden_layers": 7},
        {"rope.freq_base": 1e6},
    ),
    "qwen2": ("qwen2", "qwen2", {key: value for key, value in SMALL.items() if key != "head_dim"}, {}),
    "qwen3": ("qwen3", "qwen3", SMALL, {}),
    "qwen3moe": ("qwen3moe", "qwen3_moe", SMALL_MOE | SIZES | {"num_experts": 4, "norm_topk_prob": True}, {}),
    "qwen2moe": ("qwen2moe", "qwen2_moe", MOE | SIZES | {"num_experts": 4, "shared_expert_intermediate_size": 28}, {}),
    "olmoe": ("olmoe", "olmoe", MOE | {"num_experts": 4, "num_experts_per_tok": 2}, {}),
    "phi3": ("phi3", "phi3", MOE | {"sliding_window": 9}, {"rope.dimension_count": 8}),
    "olmo2": ("olmo2", "olmo2", MOE, {}),
    "olmo3": ("olmo2", "olmo3", MOE | {"sliding_window": 7, "num_hidden_layers": 4}, {}),
    "granite": ("granite", "granite", MOE | {"embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.5}, {}),
    "granitemoe": ("granitemoe", "granitemoe", MOE | {"num_local_experts": 4, "num_experts_per_tok": 2}, {}),
    "granitemoe with a shared expert": (
        "granitemoe",
        "granitemoeshared",
        MOE | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 20},
        {},
    ),
    "deepseek2": (
        "deepseek2",
        "deepseek_v2",
        MOE | LATENT | {"n_group": 1, "topk_group": 1, "topk_method": "greedy"},
        LATENT_KEYS | {"expert_gating_func": 1},
    ),
    "deepseek3": (
        "deepseek2",
        "deepseek_v3",
        MOE | LATENT | {"n_group": 2, "topk_group": 1, "norm_topk_prob": True},
        LATENT_KEYS | {"expert_gating_func": 2},
    ),
    "glm4": ("glm4", "glm4", SMALL | {"pad_token_id": None, "partial_rotary_factor": 0.5}, {"rope.dimension_count": 6}),
    "glm4moe": (
        "glm4moe",
        "glm4_moe",
        SMALL_MOE | SIZES | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True},
        {"rope.dimension_count": 6},
    ),
    "gpt-oss": (
        "gpt-oss",
        "gpt_oss",
        SMALL_MOE | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7}
        | rope("yarn", 150000.0, factor=4.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0, truncate=False),
        {
            "expert_feed_forward_length": 40,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
        },
    ),
    "smollm3": ("smollm3", "smollm3", MOE | {"num_hidden_layers": 4}, {}),
    "command-r": ("command-r", "cohere", MOE | {"logit_scale": 0.3, "layer_norm_eps": 1e-5}, {}),
    "cohere2": ("cohere2", "cohere2", MOE | WINDOWS | {"logit_scale": 0.3, "layer_norm_eps": 1e-5, "head_dim": 8}, {}),
    "starcoder2": ("starcoder2", "starcoder2", MOE | {"norm_epsilon": 1e-5, "sliding_window": None}, {}),
}  # fmt: skip
QUICK = ("llama", "gemma3", "qwen3moe", "phi3", "gpt-oss", "deepseek3")


def write_checkpoint(model_type: str, config: Mapping[str, Any], directory: Path) -> HuggingFaceSuite:
    """Write a checkpoint of transformers, and return the suite that reads it."""
    import transformers

    torch.manual_seed(0)
    built = transformers.AutoConfig.for_model(model_type, **config)
    model = transformers.AutoModelForCausalLM.from_config(built, dtype=torch.float32)
    randomise(model)
    model.save_pretrained(directory)
    suite = HuggingFaceSuite()
    suite.model_type = model_type
    return suite


def test_every_family_is_tested() -> None:
    assert {architecture for architecture, *_ in CASES.values()} == set(FAMILIES)


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.full) for case in CASES]
)
def test_logits_are_those_of_the_converted_checkpoint(case: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    architecture, model_type, config, more = CASES[case]
    suite = write_checkpoint(model_type, config, tmp_path / "theirs")
    directory = locate(str(convert(tmp_path / "theirs", architecture, more, tmp_path / "model.gguf")))
    assert is_gguf_directory(directory)
    suite.name = next(name for name, spec in _models().items() if _architecture(directory) in spec)
    model = suite.new_model(suite.describe(directory))
    load_weights(model, directory, shown=False)
    tokens = [int(token) for token in torch.randint(3, 97, (40,), generator=torch.Generator().manual_seed(1))]
    theirs = suite.reference(tmp_path / "theirs")
    assert theirs is not None
    torch.testing.assert_close(suite.logits(model, tokens, 40), theirs(tokens), rtol=1e-3, atol=2e-3)


def _architecture(directory: Path) -> str:
    from dovetail.config.checkpoint import read_json

    return read_json(directory, "config.json")["architectures"][0]


def _models() -> dict[str, tuple[str, ...]]:
    from dovetail.registry.specs import ComponentKind
    from dovetail.testing.installed import installed

    return {component.spec.name: component.spec.aliases for component in installed().components(ComponentKind.MODEL)}
