"""Describe GPT-J from config.json alone. Does not import torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dovetail.errors import ConfigError
from dovetail.interfaces.model import ModelInfo
from dovetail.layers.rope import read_rope
from dovetail_models.describe import make_info
from dovetail_models.layer_norm_describe import (
    LayerNormConfig,
    all_heads,
    attention_scales,
    no_windows,
    read_activation,
    refuse_tied,
    renamed,
)
from dovetail_models.settings import read_float, read_int, refuse_unread


def describe_gptj(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of GPT-J. Raises ``ConfigError``."""
    architecture = "GPTJForCausalLM"
    names = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    sizes = {"hidden_size": 4096, "num_hidden_layers": 28, "num_attention_heads": 16, "vocab_size": 50400}
    given = renamed(config, names, sizes)
    refuse_unread(config, (), architecture)
    heads = all_heads(given)
    positions = read_int(config, "n_positions", read_int(config, "max_position_embeddings", 2048))
    rope = read_rope({}, heads.head_dim, positions)
    rotary_dim = read_int(config, "rotary_dim", 64 if "rotary_dim" not in config else heads.head_dim)
    if rotary_dim % 2 or rotary_dim > heads.head_dim:
        raise ConfigError(
            f"config.json: rotary_dim is {rotary_dim}; allowed: an even number up to head_dim, {heads.head_dim}"
        )
    refuse_tied(config, architecture)
    own = LayerNormConfig(
        intermediate_size=read_int(config, "n_inner", 4 * given["hidden_size"]),
        norm_eps=read_float(config, "layer_norm_epsilon", 1e-5),
        rope=replace(rope, partial_dim=rotary_dim % heads.head_dim),
        windows=no_windows(given),
        activation=read_activation(config, "activation_function", "gelu_new"),
        scales=attention_scales(given, heads),
        qkv_bias=False,
        out_bias=False,
        parallel=True,
        mlp_norm=False,
        rotated_pairs=True,
        head_bias=True,
    )
    return make_info(given, architecture, heads, positions, own)
