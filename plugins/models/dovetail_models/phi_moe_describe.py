"""Describe Phi-3.5-MoE from config.json alone. Does not import torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dovetail.errors import ConfigError
from dovetail.interfaces.expert_shapes import ExpertsShape, RoutingRule
from dovetail.interfaces.model import ModelInfo
from dovetail_models.dense_describe import uniform_windows
from dovetail_models.describe import read_heads, refuse_activation
from dovetail_models.moe_describe import (
    COUNTS,
    MIXTRAL_NAMES,
    moe_config,
    moe_info,
    read_expert_count,
    read_moe_rope,
)
from dovetail_models.settings import read_flag, read_float, read_int, refuse_unread


def describe_phi_moe(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of Phi-3.5-MoE. Raises ``ConfigError``."""
    architecture = "PhimoeForCausalLM"
    refuse_unread(config, COUNTS | {"attention_bias", "sliding_window"}, architecture)
    refuse_activation(config)
    sizes = read_heads(config, default_kv_heads=8)
    rope = read_moe_rope(config, sizes, 1e6, 131072)
    top_k = read_int(config, "num_experts_per_tok", 2)
    if top_k != 2:
        raise ConfigError(f"config.json: num_experts_per_tok is {top_k}; {architecture} implements 2")
    jitter = read_float(config, "router_jitter_noise", 0.01)
    rule = RoutingRule(read_expert_count(config, 16), top_k, scoring="sparsemixer", jitter=jitter)
    experts = ExpertsShape(read_int(config, "hidden_size"), read_int(config, "intermediate_size"), rule)
    windows = uniform_windows(config, read_int(config, "num_hidden_layers"), None)
    bias = read_flag(config, "attention_bias")
    own = moe_config(config, experts, rope, windows=windows, eps=1e-5)
    head_bias = read_flag(config, "lm_head_bias")
    own = replace(own, qkv_bias=bias, out_bias=bias, head_bias=head_bias, names=MIXTRAL_NAMES)
    return moe_info(config, architecture, sizes, rope.context_len, own)
