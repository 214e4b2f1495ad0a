"""Test dense models with other layers than Llama's against Hugging Face transformers: OLMo 2 and 3, GLM-4, Cohere.

Run: python -m pytest tests/plugins/test_models_variants.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import transformers

from dovetail.errors import ConfigError
from dovetail_models.cohere_describe import describe_cohere, describe_cohere2
from dovetail_models.glm_describe import describe_glm, describe_glm4
from dovetail_models.olmo_describe import describe_olmo2, describe_olmo3
from hf_suite import SMALL, HuggingFaceSuite, check_watched_layers, rope

TWO = {"num_hidden_layers": 2}
GLM = TWO | {"pad_token_id": None}
TYPES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}


class TestOlmo2(HuggingFaceSuite):
    name = model_type = "olmo2"
    configs: ClassVar = {"plain": TWO, "biases": TWO | {"attention_bias": True, "num_key_value_heads": 1}}


class TestOlmo3(HuggingFaceSuite):
    name = model_type = "olmo3"
    configs: ClassVar = {
        "two rotations": TWO
        | TYPES
        | {
            "rope_parameters": {
                "full_attention": rope("yarn", 5e5, factor=4.0, original_max_position_embeddings=64)["rope_parameters"],
                "sliding_attention": rope("default", 5e5)["rope_parameters"],
            }
        },
    }


def test_layers_of_one_type_have_its_rotation() -> None:
    """OLMo 3 with windows in all layers rotates as these layers do, not as layers with full attention would."""
    config: dict[str, Any] = {**SMALL, **TestOlmo3.configs["two rotations"]} | {
        "layer_types": ["sliding_attention"] * 2
    }
    own = describe_olmo3(config).config
    assert [one.kind for one in own.layer_ropes] == ["default"] * 2
    both = {kind: rope("default", 5e5)["rope_parameters"] for kind in ("full_attention", "sliding_attention")}
    assert not describe_olmo3(config | {"rope_parameters": both}).config.layer_ropes


class TestGlm(HuggingFaceSuite):
    name = model_type = "glm"
    configs: ClassVar = {"half": GLM, "tied": GLM | {"attention_bias": False, "tie_word_embeddings": True}}


class TestGlm4(HuggingFaceSuite):
    name = model_type = "glm4"
    configs: ClassVar = {"half": GLM, "quarter": GLM | {"head_dim": 16, "partial_rotary_factor": 0.25}}


class TestCohere(HuggingFaceSuite):
    name = model_type = "cohere"
    configs: ClassVar = {"plain": TWO | {"logit_scale": 0.3}}


class TestCohere2(HuggingFaceSuite):
    name = model_type = "cohere2"
    configs: ClassVar = {
        "layers": TWO | TYPES | {"logit_scale": 0.3},
        "biases": TWO | {"attention_bias": True, "sliding_window": 9, "tie_word_embeddings": False},
    }


@pytest.mark.parametrize("suite", [TestOlmo3, TestGlm4, TestCohere2])
def test_watched_layers_are_those_of_transformers(suite: type[HuggingFaceSuite], tmp_path: Path) -> None:
    check_watched_layers(suite(), tmp_path)


SHAPE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def test_absent_settings_are_those_of_transformers() -> None:
    for describe, built in (
        (describe_olmo2, transformers.Olmo2Config()),
        (describe_olmo3, transformers.Olmo3Config()),
        (describe_glm, transformers.GlmConfig()),
        (describe_glm4, transformers.Glm4Config()),
        (describe_cohere, transformers.CohereConfig()),
        (describe_cohere2, transformers.Cohere2Config()),
    ):
        info = describe({key: getattr(built, key) for key in SHAPE})
        kinds = getattr(built, "layer_types", None) or ["full_attention"] * info.num_layers
        eps = getattr(built, "rms_norm_eps", None) or built.layer_norm_eps
        ropes: Any = built.rope_parameters
        assert info.num_kv_heads == built.num_key_value_heads
        assert info.head_dim == getattr(built, "head_dim", built.hidden_size // built.num_attention_heads)
        assert info.context_len == built.max_position_embeddings
        assert info.config.norm_eps == eps
        assert info.config.rope.theta == ropes.get("full_attention", ropes)["rope_theta"]
        assert info.config.rope.rotary_dim == info.head_dim * ropes.get("partial_rotary_factor", 1)
        assert info.config.tied == built.tie_word_embeddings
        assert info.config.attention_bias == built.attention_bias
        width = getattr(built, "sliding_window", None) or info.context_len
        windows = [width if width < info.context_len and kind == "sliding_attention" else None for kind in kinds]
        assert info.config.windows == tuple(windows)
    assert describe_glm4({key: getattr(transformers.Glm4Config(), key) for key in SHAPE}).eos_token_ids == (
        151329,
        151336,
        151338,
    )


def test_olmo3_as_published_stretches_full_attention_only() -> None:
    config = {key: getattr(transformers.Olmo3Config(), key) for key in SHAPE} | {
        "max_position_embeddings": 65536,
        "rope_theta": 500000,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        "sliding_window": 4096,
    }
    info = describe_olmo3(config)
    assert info.context_len == 65536
    assert [rope.kind for rope in info.config.layer_ropes[:4]] == ["default"] * 3 + ["yarn"]
    assert {rope.theta for rope in info.config.layer_ropes} == {5e5}
    assert {rope.context_len for rope in info.config.layer_ropes} == {65536}


@pytest.mark.parametrize(
    ("describe", "change", "message"),
    [
        (describe_olmo2, {"sliding_window": 64}, "sliding_window is 64"),
        (describe_olmo2, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (describe_olmo2, {"clip_qkv": 8}, "clip_qkv is 8"),
        (describe_olmo3, {"layer_types": ["full_attention", "mamba"]}, "mamba"),
        (describe_glm, {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        (describe_glm4, {"num_experts": 8}, "num_experts is 8"),
        (describe_cohere, {"use_qk_norm": True}, "use_qk_norm is True"),
        (describe_cohere2, {"layer_types": ["full_attention"]}, "a list of 2 types"),
        (describe_cohere2, {"logit_scale": -1}, "logit_scale is -1"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(describe: Any, change: dict[str, Any], message: str) -> None:
    shape = dict.fromkeys(SHAPE, 64) | TWO | {"num_attention_heads": 4, "num_key_value_heads": 2}
    describe(shape)
    with pytest.raises(ConfigError, match=message):
        describe(shape | change)
