"""Describe Granite 3 from config.json alone. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dovetail.interfaces.model import ModelInfo
from dovetail.layers.rope import read_rope
from dovetail_models.dense_describe import DenseConfig
from dovetail_models.describe import make_info, read_heads, refuse_activation
from dovetail_models.settings import read_flag, read_float, read_int, refuse_unread

ARCHITECTURE = "GraniteForCausalLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteSizes(DenseConfig):
    """Hold what ``GraniteModel`` needs in addition to ``DenseConfig``: what multiplies embeddings, attention logits and
    all that layers add, and what divides logits."""

    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float


def describe_granite(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of Granite 3. Raises ``ConfigError``."""
    factors = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    refuse_unread(config, {"attention_bias", "mlp_bias", *factors}, ARCHITECTURE)
    refuse_activation(config)
    sizes = read_heads(config)
    rope = read_rope(config, sizes.head_dim, read_int(config, "max_position_embeddings", 2048))
    bias = read_flag(config, "attention_bias")
    own = GraniteSizes(
        intermediate_size=read_int(config, "intermediate_size"),
        norm_eps=read_float(config, "rms_norm_eps", 1e-6),
        rope=rope,
        windows=(None,) * read_int(config, "num_hidden_layers"),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=read_flag(config, "mlp_bias"),
        tied=read_flag(config, "tie_word_embeddings"),
        embedding_multiplier=read_float(config, "embedding_multiplier", 1.0),
        attention_multiplier=read_float(config, "attention_multiplier", 1.0),
        residual_multiplier=read_float(config, "residual_multiplier", 1.0),
        logits_scaling=read_float(config, "logits_scaling", 1.0),
    )
    return make_info(config, ARCHITECTURE, sizes, rope.context_len, own)
