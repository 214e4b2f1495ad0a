"""Describe GPT-2 from config.json alone. Does not import torch."""

from __future__ import annotations

from typing import Any

from dovetail.interfaces.model import ModelInfo
from dovetail_models.describe import make_info
from dovetail_models.layer_norm_describe import LayerNormConfig, all_heads, read_activation, renamed
from dovetail_models.settings import read_flag, read_float, read_int, refuse_other, refuse_unread


def describe_gpt2(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of GPT-2. Raises ``ConfigError``."""
    architecture = "GPT2LMHeadModel"
    names = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    sizes = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 50257}
    given = renamed(config, names, sizes)
    refuse_unread(config, (), architecture)
    refuse_other(config, {"add_cross_attention": False}, architecture)
    heads, layers = all_heads(given), given["num_hidden_layers"]
    positions = read_int(config, "n_positions", read_int(config, "max_position_embeddings", 1024))
    scale = heads.head_dim**-0.5 if read_flag(config, "scale_attn_weights", default=True) else 1.0
    by_layer = read_flag(config, "scale_attn_by_inverse_layer_idx")
    own = LayerNormConfig(
        intermediate_size=read_int(config, "n_inner", 4 * given["hidden_size"]),
        norm_eps=read_float(config, "layer_norm_epsilon", 1e-5),
        rope=None,
        windows=(None,) * layers,
        tied=read_flag(config, "tie_word_embeddings", default=True),
        activation=read_activation(config, "activation_function", "gelu_new"),
        scales=tuple(scale / (index + 1) if by_layer else scale for index in range(layers)),
        positions=positions,
    )
    return make_info(given, architecture, heads, positions, own)
