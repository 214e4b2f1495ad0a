"""Test models whose routers have a correction bias against Hugging Face transformers: GLM-4.5, MiniMax-M2 and
ERNIE 4.5.

Run: python -m pytest tests/plugins/test_models_moe_corrected.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import transformers

from dovetail.errors import ConfigError
from dovetail.interfaces.features import Feature
from dovetail.interfaces.model import ModelInfo
from dovetail_models.moe_corrected_describe import describe_ernie_moe, describe_glm4_moe, describe_minimax_m2
from moe_suite import MoeSuite


class TestGlm4Moe(MoeSuite):
    name = model_type = "glm4_moe"
    configs: ClassVar = {
        "groups": {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "n_group": 4,
            "topk_group": 2,
            "use_qk_norm": True,
            "routed_scaling_factor": 2.5,
        },
        "no group, two shared experts": {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "attention_bias": True,
            "first_k_dense_replace": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
        },
    }


class TestMinimaxM2(MoeSuite):
    name = model_type = "minimax_m2"
    configs: ClassVar = {
        "half": {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16, "rotary_dim": 8},
        "whole": {"num_local_experts": 4, "num_experts_per_tok": 1, "num_key_value_heads": 1},
    }


class TestErnieMoe(MoeSuite):
    name = "ernie_moe"
    model_type = "ernie4_5_moe"
    configs: ClassVar = {
        "shared experts": {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 20},
        "all layers, none shared": {
            "moe_num_experts": 4,
            "moe_k": 3,
            "moe_intermediate_size": 12,
            "moe_num_shared_experts": 0,
            "moe_layer_start_index": 0,
            "tie_word_embeddings": False,
        },
    }


SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 100,
}
Describe = Callable[[dict[str, Any]], ModelInfo]


@pytest.mark.parametrize(
    ("describe", "built"),
    [
        (describe_glm4_moe, transformers.Glm4MoeConfig()),
        (describe_minimax_m2, transformers.MiniMaxM2Config()),
        (describe_ernie_moe, transformers.Ernie4_5_MoeConfig()),
    ],
)
def test_describe_fills_in_what_transformers_would(describe: Describe, built: Any) -> None:
    shape = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    given = {key: getattr(built, key) for key in shape}
    if describe is describe_glm4_moe:
        given["head_dim"] = 128
    info = describe(given)
    rule = info.config.experts.routing
    assert info.num_kv_heads == built.num_key_value_heads
    assert info.context_len == built.max_position_embeddings
    assert info.config.norm_eps == built.rms_norm_eps
    assert info.config.tied == built.tie_word_embeddings
    assert info.config.rope.theta == built.rope_parameters["rope_theta"]
    assert info.config.rope.rotary_dim == info.head_dim * built.rope_parameters.get("partial_rotary_factor", 1)
    assert rule.num_experts == getattr(built, "num_local_experts", getattr(built, "num_experts", None))
    assert rule.top_k == built.num_experts_per_tok
    assert info.config.experts.size == getattr(built, "moe_intermediate_size", built.intermediate_size)
    dense = getattr(built, "first_k_dense_replace", getattr(built, "moe_layer_start_index", 0))
    assert info.config.sparse == (False,) * dense + (True,) * (info.num_layers - dense)


def test_layers_that_predict_further_tokens_are_offered_where_drafters_implement_them() -> None:
    for describe in (describe_glm4_moe, describe_ernie_moe):
        info = describe({**SHAPE, "num_nextn_predict_layers": 1})
        assert info.config.predict_layers == 1
        assert Feature.MODEL_MTP_HEAD in info.offers
    assert Feature.MODEL_MTP_HEAD not in describe_glm4_moe(SHAPE).offers


def test_ernie_has_experts_in_the_layers_of_transformers() -> None:
    config = {**SHAPE, "num_hidden_layers": 6, "moe_layer_interval": 2, "moe_layer_start_index": 2}
    assert describe_ernie_moe(config).config.sparse == (False, False, False, True, False, True)
    assert describe_ernie_moe({**config, "moe_layer_end_index": 3}).config.sparse[5] is False


@pytest.mark.parametrize(
    ("describe", "change", "message"),
    [
        (describe_glm4_moe, {"topk_group": 2}, "2 of 1 groups"),
        (describe_glm4_moe, {"n_group": 3}, "groups"),
        (describe_glm4_moe, {"sliding_window": 8}, "sliding_window is 8"),
        (describe_minimax_m2, {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        (describe_minimax_m2, {"attn_type_list": [1, 0, 1, 1]}, "attn_type_list"),
        (describe_minimax_m2, {"use_qk_norm": False}, "use_qk_norm is False"),
        (describe_minimax_m2, {"shared_intermediate_size": 8}, "shared_intermediate_size is 8"),
        (describe_ernie_moe, {"use_bias": True}, "use_bias is True"),
        (describe_ernie_moe, {"moe_norm_min": 0.1}, "moe_norm_min is 0.1"),
        (describe_ernie_moe, {"moe_use_aux_free": False}, "moe_use_aux_free is False"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(describe: Describe, change: dict[str, Any], message: str) -> None:
    describe(SHAPE)
    with pytest.raises(ConfigError, match=message):
        describe(SHAPE | change)
