"""Describe models whose routers have a correction bias from config.json alone: GLM-4.5, MiniMax-M2 and ERNIE 4.5. Does
not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dovetail.errors import ConfigError
from dovetail.interfaces.expert_shapes import ExpertsShape, RoutingRule
from dovetail.interfaces.model import ModelInfo
from dovetail_models.describe import read_heads, refuse_activation
from dovetail_models.moe_describe import (
    COUNTS,
    MIXTRAL_NAMES,
    ExpertNames,
    moe_config,
    moe_info,
    read_expert_count,
    read_moe_rope,
)
from dovetail_models.settings import read_flag, read_float, read_int, refuse_other, refuse_unread

_GLM_READS = frozenset(
    {
        "attention_bias",
        "first_k_dense_replace",
        "n_group",
        "n_routed_experts",
        "n_shared_experts",
        "norm_topk_prob",
        "partial_rotary_factor",
        "routed_scaling_factor",
        "topk_group",
        "use_qk_norm",
    }
)
_MINIMAX_NAMES = replace(MIXTRAL_NAMES, correction="e_score_correction_bias")
_ERNIE_NAMES = ExpertNames(correction="moe_statics.e_score_correction_bias")


def describe_glm4_moe(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of GLM-4.5 or GLM-4.6. Raises ``ConfigError``."""
    architecture = "Glm4MoeForCausalLM"
    refuse_unread(config, COUNTS | _GLM_READS, architecture)
    refuse_activation(config)
    layers = read_int(config, "num_hidden_layers")
    sizes = read_heads(config, default_kv_heads=8)
    rope = read_moe_rope(config, sizes, 1e4, 131072, partial=0.5)
    size = read_int(config, "moe_intermediate_size", 1408)
    rule = RoutingRule(
        read_int(config, "n_routed_experts", 128),
        read_int(config, "num_experts_per_tok", 8),
        scoring="sigmoid",
        renormalize=config.get("norm_topk_prob") is None or read_flag(config, "norm_topk_prob"),
        scale=read_float(config, "routed_scaling_factor", 1.0),
        corrected=True,
        groups=read_int(config, "n_group", 1),
        groups_kept=read_int(config, "topk_group", 1),
        float32=True,
    )
    shared = size * read_int(config, "n_shared_experts", 1)
    first = read_int(config, "first_k_dense_replace", 1, minimum=0)
    own = moe_config(
        config,
        ExpertsShape(read_int(config, "hidden_size"), size, rule, shared_size=shared),
        rope,
        sparse=[index >= first for index in range(layers)],
        eps=1e-5,
    )
    own = replace(own, qkv_bias=read_flag(config, "attention_bias"), qk_norm=read_flag(config, "use_qk_norm"))
    return moe_info(config, architecture, sizes, rope.context_len, own, predicts=True)


def describe_minimax_m2(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of MiniMax-M2. Raises ``ConfigError``."""
    architecture = "MiniMaxM2ForCausalLM"
    refuse_unread(config, COUNTS | {"partial_rotary_factor", "use_qk_norm", "scoring_func"}, architecture)
    refuse_activation(config)
    layers = read_int(config, "num_hidden_layers")
    refuse_other(
        config,
        {
            "attn_type_list": [1] * layers,
            "qk_norm_type": "per_layer",
            "scoring_func": "sigmoid",
            "use_qk_norm": True,
            "use_routing_bias": True,
        },
        architecture,
    )
    sizes = read_heads(config, default_kv_heads=8, default_head_dim=128)
    partial = 1.0 if config.get("rotary_dim") is None else read_int(config, "rotary_dim") / sizes.head_dim
    rope = read_moe_rope(config, sizes, 5e6, 196608, partial=partial)
    rule = RoutingRule(
        read_expert_count(config, 256),
        read_int(config, "num_experts_per_tok", 8),
        scoring="sigmoid",
        renormalize=True,
        corrected=True,
    )
    experts = ExpertsShape(read_int(config, "hidden_size"), read_int(config, "intermediate_size"), rule)
    own = replace(moe_config(config, experts, rope), names=_MINIMAX_NAMES, qk_norm=True, qk_norm_across_heads=True)
    return moe_info(config, architecture, sizes, rope.context_len, own)


def describe_ernie_moe(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of ERNIE 4.5 with experts. Raises ``ConfigError``."""
    architecture = "Ernie4_5_MoeForCausalLM"
    refuse_unread(config, {"moe_num_experts"}, architecture)
    refuse_activation(config)
    refuse_other(config, {"moe_gate": "topk", "moe_use_aux_free": True, "compression_ratio": 1.0}, architecture)
    if read_float(config, "moe_norm_min", 1e-12) > 1e-6:
        raise ConfigError(f"config.json: moe_norm_min is {config['moe_norm_min']}; implemented: up to 1e-06")
    sizes = read_heads(config, default_kv_heads=4)
    rope = read_moe_rope(config, sizes, 5e5, 131072)
    size = read_int(config, "moe_intermediate_size", 1536)
    rule = RoutingRule(
        read_int(config, "moe_num_experts", 64),
        read_int(config, "moe_k", 6),
        renormalize=True,
        corrected=True,
        float32=True,
    )
    shared = size * read_int(config, "moe_num_shared_experts", 2, minimum=0)
    own = moe_config(
        config,
        ExpertsShape(read_int(config, "hidden_size"), size, rule, shared_size=shared),
        rope,
        sparse=_ernie_layers(config),
        eps=1e-5,
        tied=True,
    )
    own = replace(own, names=_ERNIE_NAMES, rotates_pairs=True)
    return moe_info(config, architecture, sizes, rope.context_len, own, predicts=True)


def _ernie_layers(config: Mapping[str, Any]) -> list[bool]:
    """Return which layers have experts."""
    layers, interval = read_int(config, "num_hidden_layers"), read_int(config, "moe_layer_interval", 1)
    first = read_int(config, "moe_layer_start_index", 1, minimum=0)
    last = read_int(config, "moe_layer_end_index", -1, minimum=-1)
    last = layers - 1 if last == -1 else last
    return [(index + 1) % interval == 0 and first <= index <= last for index in range(layers)]
