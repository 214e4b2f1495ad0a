"""Describe Falcon with rotary positions from config.json alone. Does not import torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dovetail.errors import ConfigError
from dovetail.interfaces.model import ModelInfo
from dovetail.layers.rope import read_rope
from dovetail_models.describe import HeadSizes, make_info, read_heads
from dovetail_models.layer_norm_describe import (
    LayerNormConfig,
    all_heads,
    attention_scales,
    no_windows,
    read_activation,
    renamed,
)
from dovetail_models.settings import read_flag, read_float, read_int, refuse_unread


def describe_falcon(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of Falcon with rotary positions. Raises ``ConfigError``."""
    architecture = "FalconForCausalLM"
    refuse_unread(config, {"bias", "parallel_attn"}, architecture)
    given = renamed(config, {"n_embed": "hidden_size"}, {})
    grouped = read_flag(config, "new_decoder_architecture")
    parallel = read_flag(config, "parallel_attn", default=True)
    if grouped and not parallel:
        raise ConfigError("config.json: new_decoder_architecture is True, and parallel_attn False; allowed: not both")
    heads = _falcon_heads(given, grouped)
    rope = read_rope(config, heads.head_dim, read_int(config, "max_position_embeddings", 2048))
    norms = read_int(config, "num_ln_in_parallel_attn", 2 if grouped else 1)
    if norms > 1 + grouped:
        raise ConfigError(f"config.json: num_ln_in_parallel_attn is {norms}; allowed: 1, or 2 in the new architecture")
    bias = read_flag(config, "bias")
    own = LayerNormConfig(
        intermediate_size=read_int(config, "ffn_hidden_size", 4 * heads.heads * heads.head_dim),
        norm_eps=read_float(config, "layer_norm_epsilon", 1e-5),
        rope=rope,
        windows=no_windows(given),
        tied=read_flag(config, "tie_word_embeddings", default=True),
        activation=read_activation(config, "activation", "gelu"),
        scales=attention_scales(given, heads),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        parallel=parallel,
        mlp_norm=norms == 2 or not parallel,
    )
    return make_info(given, architecture, heads, rope.context_len, own)


def _falcon_heads(given: dict[str, Any], grouped: bool) -> HeadSizes:
    heads = all_heads(given)
    if grouped:
        return read_heads({**given, "num_key_value_heads": given.get("num_kv_heads"), "head_dim": None})
    return replace(heads, kv_heads=1) if read_flag(given, "multi_query", default=True) else heads
