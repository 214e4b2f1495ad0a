"""Describe StableLM from config.json alone. Does not import torch."""

from __future__ import annotations

from typing import Any

from dovetail.interfaces.model import ModelInfo
from dovetail.layers.rope import read_rope
from dovetail_models.describe import make_info, read_heads, refuse_activation
from dovetail_models.layer_norm_describe import LayerNormConfig, attention_scales, no_windows
from dovetail_models.settings import read_flag, read_float, read_int, refuse_unread


def describe_stablelm(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of StableLM. Raises ``ConfigError``."""
    architecture = "StableLmForCausalLM"
    refuse_unread(config, {"partial_rotary_factor"}, architecture)
    refuse_activation(config)
    heads = read_heads({**config, "head_dim": None}, default_kv_heads=32)
    rope = read_rope(config, heads.head_dim, read_int(config, "max_position_embeddings", 4096), 0.25)
    parallel = read_flag(config, "use_parallel_residual")
    own = LayerNormConfig(
        intermediate_size=read_int(config, "intermediate_size"),
        norm_eps=read_float(config, "layer_norm_eps", 1e-5),
        rope=rope,
        windows=no_windows(config),
        tied=read_flag(config, "tie_word_embeddings"),
        activation="silu",
        scales=attention_scales(config, heads),
        qkv_bias=read_flag(config, "use_qkv_bias"),
        out_bias=False,
        mlp_bias=False,
        parallel=parallel,
        mlp_norm=not parallel,
        gated=True,
    )
    return make_info(config, architecture, heads, rope.context_len, own)
