"""Describe gpt-oss from config.json alone. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dovetail.interfaces.expert_shapes import ExpertsShape, RoutingRule, SwiGLU
from dovetail.interfaces.features import Feature
from dovetail.interfaces.model import ModelInfo
from dovetail_models.describe import Windows, read_heads, read_layer_types, refuse_activation
from dovetail_models.moe_describe import COUNTS, ExpertNames, moe_config, moe_info, read_expert_count, read_moe_rope
from dovetail_models.settings import read_flag, read_float, read_int, refuse_unread

_READS = COUNTS | {"attention_bias", "layer_types", "sliding_window", "swiglu_alpha", "swiglu_limit"}
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def describe_gpt_oss(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of gpt-oss. Raises ``ConfigError``."""
    architecture = "GptOssForCausalLM"
    refuse_unread(config, _READS, architecture)
    refuse_activation(config)
    sizes = read_heads(config, default_kv_heads=8, default_head_dim=64)
    given = config if config.get("rope_parameters") or config.get("rope_scaling") else {**config, "rope_scaling": _ROPE}
    rope = read_moe_rope(given, sizes, 150000.0, 131072)
    # the checkpoint's own number of experts per token was called experts_per_token at first
    top_k = read_int(config, "num_experts_per_tok", read_int(config, "experts_per_token", 4))
    experts = ExpertsShape(
        read_int(config, "hidden_size"),
        read_int(config, "intermediate_size"),
        RoutingRule(read_expert_count(config, 128), top_k, after_choice=True),
        SwiGLU(read_float(config, "swiglu_alpha", 1.702), read_float(config, "swiglu_limit", 7.0), offset=1.0),
        bias=True,
        router_bias=True,
    )
    bias = config.get("attention_bias") is None or read_flag(config, "attention_bias")
    own = moe_config(config, experts, rope, windows=_windows(config), eps=1e-5)
    own = replace(own, qkv_bias=bias, out_bias=bias, names=ExpertNames(router="router"), sinks=True)
    return moe_info(config, architecture, sizes, rope.context_len, own, frozenset({Feature.ATTN_SINKS}))


def _windows(config: Mapping[str, Any]) -> Windows:
    """Return the windows of the layers: every other one, from the first on, if config.json does not say."""
    layers, window = read_int(config, "num_hidden_layers"), read_int(config, "sliding_window", 128)
    if config.get("layer_types") is None:
        return tuple(None if index % 2 else window for index in range(layers))
    return read_layer_types(config, layers, {"sliding_attention": window, "full_attention": None})
