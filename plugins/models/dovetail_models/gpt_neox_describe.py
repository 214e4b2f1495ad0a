"""Describe GPT-NeoX from config.json alone. Does not import torch."""

from __future__ import annotations

from typing import Any

from dovetail.interfaces.model import ModelInfo
from dovetail.layers.rope import read_rope
from dovetail_models.describe import make_info
from dovetail_models.layer_norm_describe import (
    LayerNormConfig,
    all_heads,
    attention_scales,
    no_windows,
    read_activation,
    renamed,
)
from dovetail_models.settings import read_flag, read_float, read_int, refuse_unread


def describe_gpt_neox(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of GPT-NeoX, such as Pythia. Raises ``ConfigError``."""
    architecture = "GPTNeoXForCausalLM"
    refuse_unread(config, {"attention_bias", "partial_rotary_factor"}, architecture)
    heads = all_heads(config)
    # the first versions of transformers have these names
    named = renamed(config, {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}, {})
    rope = read_rope(named, heads.head_dim, read_int(config, "max_position_embeddings", 2048), 0.25)
    bias = read_flag(config, "attention_bias", default=True)
    own = LayerNormConfig(
        intermediate_size=read_int(config, "intermediate_size"),
        norm_eps=read_float(config, "layer_norm_eps", 1e-5),
        rope=rope,
        windows=no_windows(config),
        tied=read_flag(config, "tie_word_embeddings"),
        activation=read_activation(config, "hidden_act", "gelu"),
        scales=attention_scales(config, heads),
        qkv_bias=bias,
        out_bias=bias,
        parallel=read_flag(config, "use_parallel_residual", default=True),
    )
    return make_info(config, architecture, heads, rope.context_len, own)
