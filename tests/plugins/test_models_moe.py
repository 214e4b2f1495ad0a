"""Test models with experts against Hugging Face transformers: Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE.

Run: python -m pytest tests/plugins/test_models_moe.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import transformers

from dovetail.errors import ConfigError
from dovetail.interfaces.model import ModelInfo
from dovetail_models.moe_describe import describe_mixtral, describe_olmoe, describe_qwen2_moe, describe_qwen3_moe
from moe_suite import MoeSuite

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}


class TestMixtral(MoeSuite):
    name = model_type = "mixtral"
    configs: ClassVar = {
        "top 2": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "window": {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 7, "tie_word_embeddings": True},
    }


class TestQwen3Moe(MoeSuite):
    name = model_type = "qwen3_moe"
    configs: ClassVar = {
        "normalised": EXPERTS | {"norm_topk_prob": True},
        "dense layer": EXPERTS | {"mlp_only_layers": [0], "attention_bias": True},
        "step": EXPERTS
        | {"decoder_sparse_step": 2, "num_experts_per_tok": 1, "sliding_window": 6, "use_sliding_window": True},
    }


class TestQwen2Moe(MoeSuite):
    name = model_type = "qwen2_moe"
    configs: ClassVar = {
        "shared expert": EXPERTS | {"shared_expert_intermediate_size": 24},
        "dense layer": EXPERTS
        | {"shared_expert_intermediate_size": 16, "mlp_only_layers": [1], "norm_topk_prob": True, "qkv_bias": False},
    }


class TestOlmoe(MoeSuite):
    """The norms of transformers take ``hidden_size / num_attention_heads`` as the size of a head."""

    name = model_type = "olmoe"
    configs: ClassVar = {
        "plain": {"num_experts": 6, "num_experts_per_tok": 2, "head_dim": 8},
        "normalised, one kv head": {
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "head_dim": 8,
            "num_key_value_heads": 1,
            "norm_topk_prob": True,
            "attention_bias": True,
        },
    }


SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
Describe = Callable[[dict[str, Any]], ModelInfo]


@pytest.mark.parametrize(
    ("describe", "built"),
    [
        (describe_mixtral, transformers.MixtralConfig()),
        (describe_qwen2_moe, transformers.Qwen2MoeConfig()),
        (describe_qwen3_moe, transformers.Qwen3MoeConfig()),
        (describe_olmoe, transformers.OlmoeConfig()),
    ],
)
def test_describe_fills_in_what_transformers_would(describe: Describe, built: Any) -> None:
    shape = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    info = describe({key: getattr(built, key) for key in shape})
    rule = info.config.experts.routing
    assert info.num_kv_heads == built.num_key_value_heads
    assert info.context_len == built.max_position_embeddings
    assert info.config.norm_eps == built.rms_norm_eps
    assert info.config.rope.theta == built.rope_parameters["rope_theta"]
    assert rule.num_experts == (built.num_local_experts if describe is describe_mixtral else built.num_experts)
    assert rule.top_k == built.num_experts_per_tok
    assert info.config.experts.size == getattr(built, "moe_intermediate_size", built.intermediate_size)
    assert info.config.experts.shared_size == getattr(built, "shared_expert_intermediate_size", 0)
    assert info.config.sparse == (True,) * info.num_layers
    assert info.config.windows == (None,) * info.num_layers


@pytest.mark.parametrize("describe", [describe_qwen2_moe, describe_qwen3_moe])
def test_layers_with_experts_are_those_of_transformers(describe: Describe) -> None:
    config = {**SHAPE, "num_hidden_layers": 7, "decoder_sparse_step": 3, "mlp_only_layers": [5]}
    assert describe(config).config.sparse == (False, False, True, False, False, False, False)


@pytest.mark.parametrize(
    ("describe", "change", "message"),
    [
        (describe_mixtral, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (describe_mixtral, {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size is 8"),
        (describe_mixtral, {"num_experts_per_tok": 9}, "9 of 8 experts"),
        (describe_mixtral, {"mlp_only_layers": [0]}, "mlp_only_layers"),
        (describe_qwen2_moe, {"attention_bias": True}, "attention_bias is True"),
        (describe_qwen2_moe, {"mlp_only_layers": "none"}, "a list of indices"),
        (describe_qwen3_moe, {"n_group": 4}, "n_group is 4"),
        (describe_qwen3_moe, {"clip_qkv": 8.0}, "clip_qkv is 8"),
        (describe_qwen3_moe, {"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'"),
        (describe_qwen3_moe, {"num_experts": 0}, "num_experts is 0"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(describe: Describe, change: dict[str, Any], message: str) -> None:
    describe(SHAPE)
    with pytest.raises(ConfigError, match=message):
        describe(SHAPE | change)
