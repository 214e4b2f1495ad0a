"""Test Phi-3.5-MoE against Hugging Face transformers.

Run: python -m pytest tests/plugins/test_models_phi_moe.py
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import transformers

from dovetail.errors import ConfigError
from dovetail_models.phi_moe_describe import describe_phi_moe
from moe_suite import MoeSuite

FACTORS = [1.0, 1.5, 2.0, 2.5, 3.0, 4.0]


class TestPhiMoe(MoeSuite):
    """With one list of factors for short and for long texts: transformers takes the short ones for all, and Dovetail the
    long ones, because keys are kept."""

    name = "phi_moe"
    model_type = "phimoe"
    configs: ClassVar = {
        "biases": {"num_local_experts": 6, "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.1},
        "longrope, window": {
            "num_local_experts": 4,
            "sliding_window": 9,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "short_factor": FACTORS,
                "long_factor": FACTORS,
                "short_mscale": 1.2,
                "long_mscale": 1.2,
                "original_max_position_embeddings": 64,
            },
        },
    }


SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 100,
}


def test_describe_fills_in_what_transformers_would() -> None:
    built: Any = transformers.PhimoeConfig()
    shape = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    info = describe_phi_moe({key: getattr(built, key) for key in shape})
    rule = info.config.experts.routing
    assert info.num_kv_heads == built.num_key_value_heads
    assert info.context_len == built.max_position_embeddings
    assert info.config.norm_eps == built.rms_norm_eps
    assert info.config.rope.theta == built.rope_parameters["rope_theta"]
    assert (rule.num_experts, rule.top_k, rule.jitter) == (built.num_local_experts, 2, built.router_jitter_noise)
    assert info.config.head_bias is built.lm_head_bias


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 3}, "num_experts_per_tok is 3"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"lm_head_bias": 1}, "lm_head_bias is 1"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "short_factor"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    describe_phi_moe(SHAPE)
    with pytest.raises(ConfigError, match=message):
        describe_phi_moe(SHAPE | change)
