"""Describe OPT from config.json alone. Does not import torch."""

from __future__ import annotations

from typing import Any

from dovetail.interfaces.model import ModelInfo
from dovetail_models.describe import make_info
from dovetail_models.layer_norm_describe import (
    LayerNormConfig,
    all_heads,
    attention_scales,
    no_windows,
    read_activation,
    renamed,
)
from dovetail_models.settings import read_flag, read_int, refuse_other, refuse_unread


def describe_opt(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of OPT. Raises ``ConfigError``."""
    architecture = "OPTForCausalLM"
    sizes = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 50272}
    given = renamed(config, {}, sizes)
    refuse_unread(config, (), architecture)
    implemented = {
        "_remove_final_layer_norm": False,
        "do_layer_norm_before": True,
        "layer_norm_elementwise_affine": True,
        "word_embed_proj_dim": given["hidden_size"],
    }
    refuse_other(config, implemented, architecture)
    heads, bias = all_heads(given), read_flag(config, "enable_bias", default=True)
    positions = read_int(config, "max_position_embeddings", 2048)
    own = LayerNormConfig(
        intermediate_size=read_int(config, "ffn_dim", 3072),
        norm_eps=1e-5,
        rope=None,
        windows=no_windows(given),
        tied=read_flag(config, "tie_word_embeddings", default=True),
        activation=read_activation(config, "activation_function", "relu"),
        scales=attention_scales(given, heads),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        positions=positions,
    )
    return make_info(given, architecture, heads, positions, own)
