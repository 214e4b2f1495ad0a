"""Test OPT, Phi-2, GPT-J, StableLM and Falcon against Hugging Face transformers.

Run: python -m pytest tests/plugins/test_models_layer_norm.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from safetensors.torch import save_file

from dovetail.errors import ConfigError
from dovetail.testing.model import Reference, read_tensors
from hf_suite import TWO_LAYERS, HuggingFaceSuite, describe, rope


class TestOPT(HuggingFaceSuite):
    small = TWO_LAYERS
    name = model_type = "opt"
    without_effect = (r".*\.k_proj\.bias",)
    configs: ClassVar = {
        "plain": {"ffn_dim": 60},
        "no biases": {"enable_bias": False, "ffn_dim": 60, "tie_word_embeddings": False, "activation_function": "gelu"},
    }


class TestPhi(HuggingFaceSuite):
    small = TWO_LAYERS
    name = model_type = "phi"
    configs: ClassVar = {
        "half of a head": {},
        "fewer kv heads": {"num_key_value_heads": 1, "layer_norm_eps": 0.1, **rope("default", 100.0)},
    }


class TestGPTJ(HuggingFaceSuite):
    name = model_type = "gptj"
    small: ClassVar = {
        "vocab_size": 97,
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "initializer_range": 0.1,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    configs: ClassVar = {"part of a head": {"rotary_dim": 8}, "whole heads": {"rotary_dim": 12, "n_inner": 60}}


class TestStableLm(HuggingFaceSuite):
    small = TWO_LAYERS
    name = model_type = "stablelm"
    configs: ClassVar = {
        "in turn": {"hidden_size": 64, "use_qkv_bias": True},
        "parallel": {"use_parallel_residual": True, **rope("default", 100.0, partial_rotary_factor=0.5)},
    }


class TestFalcon(HuggingFaceSuite):
    small = TWO_LAYERS
    name = model_type = "falcon"
    configs: ClassVar = {
        "one key": {"multi_query": True},
        "groups": {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 60},
        "groups of one norm": {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "bias": True,
            "tie_word_embeddings": False,
        },
        "in turn": {"multi_query": False, "parallel_attn": False, "bias": True},
    }


class TestQwen(HuggingFaceSuite):
    """Transformers has no class for Qwen, which computes what Qwen2 does."""

    name = "qwen"
    small: ClassVar = TWO_LAYERS
    model_type = "qwen2"
    configs: ClassVar = {"plain": {"num_key_value_heads": 4}}

    def write_checkpoint(self, config: Mapping[str, Any], directory: Path) -> None:
        sizes = {**self.small, **config}
        super().write_checkpoint(config, directory / "qwen2")
        tensors = read_tensors(directory / "qwen2")
        named: dict[str, torch.Tensor] = {"lm_head.weight": tensors["lm_head.weight"]}
        for name in ("wte:embed_tokens", "ln_f:norm"):
            theirs, ours = name.split(":")
            named[f"transformer.{theirs}.weight"] = tensors[f"model.{ours}.weight"]
        for layer in range(2):
            old, new = f"model.layers.{layer}", f"transformer.h.{layer}"
            for field in ("weight", "bias"):
                parts = [tensors[f"{old}.self_attn.{part}_proj.{field}"] for part in ("q", "k", "v")]
                named[f"{new}.attn.c_attn.{field}"] = torch.cat(parts)
            for theirs, ours in QWEN.items():
                named[f"{new}.{theirs}.weight"] = tensors[f"{old}.{ours}.weight"]
        save_file(named, directory / "model.safetensors")
        given = {
            "architectures": ["QWenLMHeadModel"],
            "kv_channels": 12,
            "layer_norm_epsilon": 1e-6,
            "rotary_emb_base": 10000,
            "seq_length": 256,
            "use_dynamic_ntk": True,
            "use_logn_attn": True,
            "no_bias": True,
            **{key: sizes[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")},
            "intermediate_size": 2 * sizes["intermediate_size"],
            "max_position_embeddings": 1024,
        }
        (directory / "config.json").write_text(json.dumps(given))

    def reference(self, directory: Path) -> Reference | None:
        return super().reference(directory / "qwen2")


QWEN = {
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "attn.c_proj": "self_attn.o_proj",
    "mlp.w1": "mlp.up_proj",
    "mlp.w2": "mlp.gate_proj",
    "mlp.c_proj": "mlp.down_proj",
}


def test_describe_fills_in_what_transformers_would() -> None:
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    built: Any
    for built in (
        transformers.OPTConfig(),
        transformers.PhiConfig(),
        transformers.GPTJConfig(),
        transformers.StableLmConfig(),
        transformers.FalconConfig(),
    ):
        info = describe(built.model_type, {key: getattr(built, key, None) for key in sizes})
        assert info.vocab_size == built.vocab_size
        assert info.context_len == built.max_position_embeddings
        assert info.config.tied == built.tie_word_embeddings
        assert info.num_kv_heads == (
            1 if built.model_type == "falcon" else getattr(built, "num_key_value_heads", info.num_heads)
        )
        partial = (getattr(built, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
        rotary_dim = getattr(built, "rotary_dim", int(info.head_dim * partial))
        assert info.config.rope is None or info.config.rope.rotary_dim == rotary_dim


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "opt",
            {"do_layer_norm_before": False},
            "do_layer_norm_before is False, which OPTForCausalLM does not implement here; allowed: null or absent, True",
        ),
        (
            "opt",
            {"word_embed_proj_dim": 32},
            "word_embed_proj_dim is 32, which OPTForCausalLM does not implement here; allowed: null or absent, 48",
        ),
        ("phi", {"qk_layernorm": True}, "qk_layernorm is True"),
        ("phi", {"tie_word_embeddings": True}, "has a head with a bias of its own"),
        ("gptj", {"n_embd": 48, "n_head": 4, "rotary_dim": 64}, "rotary_dim is 64; allowed: an even number up to"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm is True"),
        (
            "qwen",
            {"no_bias": False},
            "no_bias is False, which QWenLMHeadModel does not implement here; allowed: null or absent, True",
        ),
        ("falcon", {"alibi": True}, "alibi is True, which FalconForCausalLM does not implement here"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn is 2; allowed: 1"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "allowed: not both"),
    ],
)
def test_what_is_not_computed_is_refused(name: str, change: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        describe(name, {**TWO_LAYERS, **change})
