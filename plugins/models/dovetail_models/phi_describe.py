"""Describe Phi-1, Phi-1.5 and Phi-2 from config.json alone. Does not import torch."""

from __future__ import annotations

from typing import Any

from dovetail.interfaces.model import ModelInfo
from dovetail.layers.rope import read_rope
from dovetail_models.describe import make_info, read_heads
from dovetail_models.layer_norm_describe import (
    LayerNormConfig,
    attention_scales,
    no_windows,
    read_activation,
    refuse_tied,
)
from dovetail_models.settings import read_float, read_int, refuse_unread


def describe_phi(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of Phi-1, Phi-1.5 or Phi-2. Raises ``ConfigError``."""
    architecture = "PhiForCausalLM"
    refuse_unread(config, {"partial_rotary_factor"}, architecture)
    heads = read_heads(config)
    rope = read_rope(config, heads.head_dim, read_int(config, "max_position_embeddings", 2048), 0.5)
    refuse_tied(config, architecture)
    own = LayerNormConfig(
        intermediate_size=read_int(config, "intermediate_size"),
        norm_eps=read_float(config, "layer_norm_eps", 1e-5),
        rope=rope,
        windows=no_windows(config),
        activation=read_activation(config, "hidden_act", "gelu_new"),
        scales=attention_scales(config, heads),
        parallel=True,
        mlp_norm=False,
        head_bias=True,
    )
    return make_info(config, architecture, heads, rope.context_len, own)
