"""Test dense models that differ from Llama in weights, norms or residuals, against Hugging Face transformers.

Run: python -m pytest tests/plugins/test_models_families.py
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import transformers

from dovetail.errors import ConfigError
from hf_suite import TWO_LAYERS, HuggingFaceSuite, check_watched_layers, describe, rope


def longrope(pairs: int, original: int, **settings: Any) -> dict[str, Any]:
    factors = {
        "short_factor": [1.0 + 0.1 * pair for pair in range(pairs)],
        "long_factor": [1.5 + 0.5 * pair for pair in range(pairs)],
    }
    return {**rope("longrope", **factors, **settings), "original_max_position_embeddings": original}


class TestPhi3(HuggingFaceSuite):
    small = TWO_LAYERS
    name = model_type = "phi3"
    configs: ClassVar = {
        "window": {"sliding_window": 7},
        "part of a head": {
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
        },
        "long factors": longrope(6, 16, partial_rotary_factor=1.0),  # texts of the suite have 39 tokens or more
        "short factors of a part": {**longrope(3, 256, partial_rotary_factor=0.5), "tie_word_embeddings": True},
    }


class TestSmolLM3(HuggingFaceSuite):
    small = TWO_LAYERS
    name = model_type = "smollm3"
    configs: ClassVar = {
        "every second": {"no_rope_layers": [1, 0], "tie_word_embeddings": False},
        "by interval": {"no_rope_layer_interval": 2, "num_hidden_layers": 3, "mlp_bias": True},
        "biases": {"no_rope_layers": [1, 1], "attention_bias": True},  # of keys that do not rotate, none would matter
        "window": {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 7},
    }


class TestGranite(HuggingFaceSuite):
    small = TWO_LAYERS
    name = model_type = "granite"
    configs: ClassVar = {
        "multipliers": {
            "embedding_multiplier": 1.7,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.35,
            "logits_scaling": 1.3,
            "rms_norm_eps": 0.01,
        },
        "plain": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    }


class TestStarcoder2(HuggingFaceSuite):
    small = TWO_LAYERS
    name = model_type = "starcoder2"
    configs: ClassVar = {
        "window": {"sliding_window": 7},
        "no biases": {"use_bias": False, "tie_word_embeddings": False, "norm_epsilon": 0.1},
    }


class TestGPT2(HuggingFaceSuite):
    name = model_type = "gpt2"
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
    configs: ClassVar = {
        "plain": {},
        "by layer": {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False, "n_inner": 60},
        "untied": {"tie_word_embeddings": False, "activation_function": "relu", "layer_norm_epsilon": 0.1},
    }


class TestGPTNeoX(HuggingFaceSuite):
    small = TWO_LAYERS
    name = model_type = "gpt_neox"
    configs: ClassVar = {
        "parallel": {"hidden_size": 64},  # a quarter of each head is rotated
        "in turn": {
            "use_parallel_residual": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
            "layer_norm_eps": 0.1,
        },
        "whole heads": {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
            "attention_bias": False,
            "hidden_act": "gelu_new",
        },
    }


def test_describe_fills_in_what_transformers_would() -> None:
    """A config.json with nothing but sizes has the other settings of the class of transformers."""
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    built: Any
    for built in (transformers.Phi3Config(), transformers.SmolLM3Config(), transformers.GraniteConfig()):
        info = describe(built.model_type, {key: getattr(built, key) for key in sizes})
        rotates = getattr(built, "no_rope_layers", [1] * built.num_hidden_layers)
        assert [one is not None for one in info.config.layer_ropes or rotates] == [bool(one) for one in rotates]
        assert info.num_kv_heads == built.num_key_value_heads
        assert info.context_len == built.max_position_embeddings
        assert info.config.norm_eps == built.rms_norm_eps
        assert info.config.rope.theta == built.rope_parameters["rope_theta"]
        assert info.config.tied == built.tie_word_embeddings
    for built in (transformers.Starcoder2Config(), transformers.GPTNeoXConfig(), transformers.GPT2Config()):
        info = describe(
            built.model_type, {key: getattr(built, key, None) for key in sizes if built.model_type != "gpt2"}
        )
        assert info.vocab_size == built.vocab_size
        assert info.num_kv_heads == getattr(built, "num_key_value_heads", built.num_attention_heads)
        assert info.context_len == built.max_position_embeddings
        assert info.config.tied == built.tie_word_embeddings
        assert info.config.activation == getattr(built, "hidden_act", None) or built.activation_function
        partial = (getattr(built, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
        assert info.config.rope is None or info.config.rope.rotary_dim == info.head_dim * partial


def test_first_names_of_settings_are_read() -> None:
    """Checkpoints of the first versions of Phi-3 and of GPT-NeoX have other names than those of today."""
    factors = longrope(6, 16)["rope_parameters"]
    today = describe("phi3", {**TWO_LAYERS, **longrope(6, 16)})
    for kind in ("su", "yarn"):
        old = {"type": kind, **{key: factors[key] for key in ("short_factor", "long_factor")}}
        given = {**TWO_LAYERS, "rope_scaling": old, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
        assert describe("phi3", given) == today
    partial = rope("default", 500.0, partial_rotary_factor=0.5)
    assert describe("gpt_neox", {**TWO_LAYERS, "rotary_pct": 0.5, "rotary_emb_base": 500}) == describe(
        "gpt_neox", {**TWO_LAYERS, **partial}
    )


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "gpt2",
            {"add_cross_attention": True},
            "add_cross_attention is True, which GPT2LMHeadModel does not implement here; allowed: null or absent, False",
        ),
        ("gpt2", {"activation_function": "tanh"}, "activation_function is 'tanh'; implemented: gelu, gelu_fast"),
        ("gpt2", {"n_embd": 50}, "hidden_size is 50, num_attention_heads 12"),
        ("gpt_neox", {"sliding_window": 8}, "sliding_window is 8, which GPTNeoXForCausalLM does not implement here"),
        ("starcoder2", {"norm_type": "rms_norm"}, "norm_type is 'rms_norm'"),
        ("phi3", {"attention_bias": True}, "attention_bias is True, which Phi3ForCausalLM does not implement here"),
        ("phi3", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers is .* needed: for each of 2 layers"),
        ("smollm3", {"layer_types": ["sliding_attention"] * 2}, "layer_types has .* where use_sliding_window is true"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier is 0; allowed: a number above 0"),
    ],
)
def test_what_is_not_computed_is_refused(name: str, change: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        describe(name, {**(TWO_LAYERS if name != "gpt2" else {}), **change})


def test_descriptions_know_the_activations() -> None:
    from dovetail.layers.mlp import ACTIVATIONS
    from dovetail_models.layer_norm_describe import ACTIVATION_NAMES

    assert tuple(ACTIVATIONS) == ACTIVATION_NAMES


@pytest.mark.parametrize("suite", [TestGranite, TestGPT2, TestGPTNeoX])
def test_watched_layers_are_those_of_transformers(suite: type[HuggingFaceSuite], tmp_path: Path) -> None:
    """Drafters get the residual streams of transformers, also where the model keeps them in another scale."""
    check_watched_layers(suite(), tmp_path)
