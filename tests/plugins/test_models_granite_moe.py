"""Test Granite with experts against Hugging Face transformers.

Run: python -m pytest tests/plugins/test_models_granite_moe.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import transformers

from dovetail.errors import ConfigError
from dovetail.interfaces.model import ModelInfo
from dovetail_models.granite_moe_describe import describe_granite_moe, describe_granite_moe_shared
from moe_suite import MoeSuite

MULTIPLIED = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.3,
    "logits_scaling": 3.0,
}


class TestGraniteMoe(MoeSuite):
    name = "granite_moe"
    model_type = "granitemoe"
    configs: ClassVar = {
        "multiplied": MULTIPLIED,
        "plain": {
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    }


class TestGraniteMoeShared(MoeSuite):
    name = "granite_moe_shared"
    model_type = "granitemoeshared"
    configs: ClassVar = {
        "shared expert": MULTIPLIED | {"shared_intermediate_size": 12},
    }


SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 100,
}
Describe = Callable[[dict[str, Any]], ModelInfo]


@pytest.mark.parametrize(
    ("describe", "built"),
    [
        (describe_granite_moe, transformers.GraniteMoeConfig()),
        (describe_granite_moe_shared, transformers.GraniteMoeSharedConfig()),
    ],
)
def test_describe_fills_in_what_transformers_would(describe: Describe, built: Any) -> None:
    shape = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    info = describe({key: getattr(built, key) for key in shape})
    rule, own = info.config.experts.routing, info.config
    assert info.num_kv_heads == built.num_key_value_heads
    assert info.context_len == built.max_position_embeddings
    assert own.norm_eps == built.rms_norm_eps
    assert own.rope.theta == built.rope_parameters["rope_theta"]
    assert (rule.num_experts, rule.top_k) == (built.num_local_experts, built.num_experts_per_tok)
    for name in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"):
        assert getattr(own, name) == getattr(built, name)
    assert own.experts.shared_size == getattr(built, "shared_intermediate_size", 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shared_intermediate_size": 8}, "shared_intermediate_size is 8"),
        ({"residual_multiplier": 0}, "residual_multiplier is 0"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"position_embedding_type": "nope"}, "position_embedding_type is 'nope'"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    describe_granite_moe(SHAPE)
    with pytest.raises(ConfigError, match=message):
        describe_granite_moe(SHAPE | change)
