"""Describe StarCoder 2 from config.json alone. Does not import torch."""

from __future__ import annotations

from typing import Any

from dovetail.interfaces.model import ModelInfo
from dovetail.layers.rope import read_rope
from dovetail_models.describe import cut_windows, make_info, read_heads
from dovetail_models.layer_norm_describe import LayerNormConfig, attention_scales, read_activation
from dovetail_models.settings import read_flag, read_float, read_int, refuse_other, refuse_unread


def describe_starcoder2(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of StarCoder 2. Raises ``ConfigError``."""
    architecture = "Starcoder2ForCausalLM"
    refuse_unread(config, {"sliding_window", "use_bias"}, architecture)
    refuse_other(config, {"norm_type": "layer_norm", "mlp_type": "default"}, architecture)
    heads = read_heads(config, default_kv_heads=2)
    rope = read_rope(config, heads.head_dim, read_int(config, "max_position_embeddings", 4096))
    bias = read_flag(config, "use_bias", default=True)
    window = None if config.get("sliding_window") is None else read_int(config, "sliding_window")
    own = LayerNormConfig(
        intermediate_size=read_int(config, "intermediate_size"),
        norm_eps=read_float(config, "norm_epsilon", 1e-5),
        rope=rope,
        windows=cut_windows((window,) * read_int(config, "num_hidden_layers"), rope.context_len),
        tied=read_flag(config, "tie_word_embeddings", default=True),
        activation=read_activation(config, "hidden_act", "gelu_pytorch_tanh"),
        scales=attention_scales(config, heads),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
    )
    return make_info(config, architecture, heads, rope.context_len, own)
