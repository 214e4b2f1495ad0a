"""Compare models of the Mamba family with transformers.

Run: python -m pytest tests/plugins/test_models_mamba.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch

from dovetail.engine.build import build_model
from dovetail.errors import ConfigError
from dovetail.registry.specs import ComponentKind
from dovetail.registry.targets import load_attribute
from dovetail.testing.installed import installed
from hf_suite import HuggingFaceSuite, describe
from moe_suite import MoeSuite

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class StateSuite(HuggingFaceSuite):
    """Compare a model with states, whose long recurrences add up more rounding."""

    tolerance = 2e-4


class TestMamba2(StateSuite):
    name = "mamba2"
    model_type = "mamba2"
    small: ClassVar[Mapping[str, Any]] = COMMON | {
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 24,
        "n_groups": 2,
        "chunk_size": 16,
    }
    configs: ClassVar[Mapping[str, Any]] = {
        "two groups": {},
        "one group, biases": {"n_groups": 1, "use_bias": True, "tie_word_embeddings": True},
        "limited, no bias": {"n_groups": 4, "use_conv_bias": False, "time_step_limit": [0.002, 0.05]},
    }


HYBRID = COMMON | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "mamba_n_heads": 4,
    "mamba_d_state": 24,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
    "max_position_embeddings": 256,
}
"""Settings that hybrid models have in common."""


class TestGraniteHybrid(StateSuite):
    name = "granite_hybrid"
    model_type = "granitemoehybrid"
    bfloat16_tolerance = 0.1  # routers choose other experts for some tokens
    small: ClassVar[Mapping[str, Any]] = HYBRID | {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 24,
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.3,
        "logits_scaling": 3.0,
    }
    configs: ClassVar[Mapping[str, Any]] = {
        "without positions": {},
        "rotated, attention last, biases": {
            "position_embedding_type": "rope",
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "attention_bias": True,
            "mamba_proj_bias": True,
            "tie_word_embeddings": True,
        },
        "experts": {"num_local_experts": 4, "num_experts_per_tok": 2, "mamba_n_groups": 1},
    }


class TestBamba(StateSuite):
    name = "bamba"
    model_type = "bamba"
    small: ClassVar[Mapping[str, Any]] = HYBRID | {"attn_layer_indices": [1]}
    configs: ClassVar[Mapping[str, Any]] = {
        "biases": {
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "tie_word_embeddings": True,
        },
    }


class TestFalconH1(StateSuite):
    name = "falcon_h1"
    model_type = "falcon_h1"
    small: ClassVar[Mapping[str, Any]] = HYBRID | {"mamba_d_ssm": 64, "num_hidden_layers": 2}
    configs: ClassVar[Mapping[str, Any]] = {
        "multiplied": {
            "embedding_multiplier": 2.0,
            "lm_head_multiplier": 0.5,
            "mlp_multipliers": [0.7, 1.5],
            "key_multiplier": 0.6,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.8,
            "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 1.5],
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.7,
        },
        "norm first, biases": {
            "mamba_rms_norm": True,
            "mamba_n_groups": 1,
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "tie_word_embeddings": True,
        },
        "gate first": {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_d_head": "auto"},
    }


class TestJamba(StateSuite):
    name = "jamba"
    model_type = "jamba"
    bfloat16_tolerance = 0.1  # routers choose other experts for some tokens
    small: ClassVar[Mapping[str, Any]] = HYBRID | {
        "num_hidden_layers": 4,
        "mamba_d_state": 8,
        "mamba_dt_rank": 6,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_experts": 4,
    }
    configs: ClassVar[Mapping[str, Any]] = {
        "experts": {},
        "attention last, biases": {
            "num_hidden_layers": 3,
            "attn_layer_offset": 2,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "mamba_dt_rank": "auto",
            "tie_word_embeddings": True,
        },
    }


class TestLfm2(StateSuite):
    name = "lfm2"
    model_type = "lfm2"
    small: ClassVar[Mapping[str, Any]] = COMMON | {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 60,
        "block_multiple_of": 8,
        "max_position_embeddings": 256,
        "layer_types": ["conv", "full_attention", "conv"],
    }
    configs: ClassVar[Mapping[str, Any]] = {
        "convolution last": {},
        "attention last, biases": {
            "layer_types": ["conv", "conv", "full_attention"],
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    }


class TestNemotronH(StateSuite):
    name = "nemotron_h"
    model_type = "nemotron_h"
    small: ClassVar[Mapping[str, Any]] = {key: value for key, value in COMMON.items() if key != "num_hidden_layers"} | {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 40,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 24,
        "n_groups": 2,
        "chunk_size": 16,
        "max_position_embeddings": 256,
    }
    configs: ClassVar[Mapping[str, Any]] = {
        "MLP last": {"layers_block_type": ["linear_attention", "full_attention", "linear_attention", "mlp"]},
        "attention last, biases": {
            "layers_block_type": ["mlp", "linear_attention", "full_attention"],
            "use_bias": True,
            "mlp_bias": True,
            "use_conv_bias": False,
            "n_groups": 1,
        },
    }


class TestNemotron3(MoeSuite):
    """Compare Nemotron-H with experts."""

    name = "nemotron_h"
    model_type = "nemotron_h"
    tolerance = StateSuite.tolerance
    small: ClassVar[Mapping[str, Any]] = {
        **TestNemotronH.small,
        "n_routed_experts": 6,
        "moe_intermediate_size": 20,
        "moe_shared_expert_intermediate_size": 24,
        "routed_scaling_factor": 1.5,
    }
    configs: ClassVar[Mapping[str, Any]] = {
        "experts of fewer channels": {
            "layers_block_type": ["linear_attention", "moe", "full_attention"],
            "moe_latent_size": 16,
        },
    }


@pytest.mark.full
class TestNemotron3Variants(TestNemotron3):
    configs: ClassVar[Mapping[str, Any]] = {
        "experts last, biases": {
            "layers_block_type": ["mlp", "full_attention", "moe"],
            "n_routed_experts": 4,
            "norm_topk_prob": False,
            "mlp_bias": True,
        },
    }


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mamba2", {"num_heads": 3}, "expand"),
        ("mamba2", {"n_groups": 3}, "n_groups"),
        ("mamba2", {"time_step_limit": [0.5, 0.1]}, "time_step_limit"),
        ("mamba2", {"time_step_limit": "wide"}, "time_step_limit"),
        ("mamba2", {"hidden_act": "gelu"}, "hidden_act"),
        ("granite_hybrid", {"mamba_d_head": 7}, "mamba_d_head"),
        ("granite_hybrid", {"layer_types": ["linear_attention", "sliding", "full_attention"]}, "layer_types"),
        ("bamba", {"attn_layer_indices": [3]}, "attn_layer_indices"),
        ("bamba", {"attn_rotary_emb": 6}, "attn_rotary_emb is 6; implemented: 4"),
        ("falcon_h1", {"ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers"),
        ("falcon_h1", {"attention_bias": True, "attention_in_multiplier": 2.0}, "attention_in_multiplier"),
        ("jamba", {"attn_layer_offset": 9, "attn_layer_period": 8}, "attn_layer_offset"),
        ("jamba", {"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok"),
        ("lfm2", {"full_attn_idxs": 1}, "full_attn_idxs"),
        ("lfm2", {"block_ffn_dim_multiplier": float("inf")}, "block_ffn_dim_multiplier"),
        ("nemotron_h", {"hybrid_override_pattern": "M*E", "mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'"),
        ("nemotron_h", {"hybrid_override_pattern": "M*E", "n_shared_experts": 2}, "n_shared_experts is 2"),
        ("nemotron_h", {"hybrid_override_pattern": "M*E", "mlp_bias": True, "moe_latent_size": 8}, "mlp_bias is True"),
        ("nemotron_h", {"hybrid_override_pattern": "M*E", "num_experts_per_tok": 9}, "9 of 8 experts"),
        ("nemotron_h", {"hybrid_override_pattern": "M*?"}, "hybrid_override_pattern"),
        ("nemotron_h", {"mlp_hidden_act": "tanh"}, "mlp_hidden_act"),
        ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("nemotron_h", {"mamba_num_heads": 3}, "n_groups"),
    ],
)
def test_contradictory_configs_are_refused(name: str, change: Mapping[str, Any], message: str) -> None:
    config = HYBRID | {"num_heads": 4, "head_dim": 16, "n_groups": 2}
    config |= {} if name == "mamba2" else {"head_dim": 8, "mamba_d_ssm": 64}
    config |= {"hybrid_override_pattern": "M*-"} if name == "nemotron_h" else {}
    describe(name, config)
    with pytest.raises(ConfigError, match=message):
        describe(name, {**config, **change})


def test_limits_in_the_format_of_transformers() -> None:
    """transformers writes infinity as an object."""
    config = HYBRID | {"num_heads": 4, "head_dim": 16, "n_groups": 2}
    info = describe("mamba2", {**config, "time_step_limit": [0.001, {"__float__": "Infinity"}]})
    assert info.config.mixer.limits == (0.001, float("inf"))


def test_lfm2_without_a_list_of_layers_attends_in_all() -> None:
    config = HYBRID | {"head_dim": 8}
    info = describe("lfm2", config)
    assert [group.num_layers for group in info.cache_groups] == [3]
    target = load_attribute(installed().get(ComponentKind.MODEL, "lfm2").spec.target, "lfm2")
    build_model(target, info, torch.device("meta"), torch.float32)
