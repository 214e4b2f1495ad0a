"""Describe Cohere's Command R and Command R7B from config.json alone. Does not import torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from dovetail.interfaces.model import ModelInfo
from dovetail.layers.rope import read_rope
from dovetail_models.describe import (
    DecoderConfig,
    cut_windows,
    layer_pattern,
    make_info,
    read_heads,
    read_layer_types,
    refuse_activation,
)
from dovetail_models.settings import read_flag, read_float, read_int, refuse_unread


@dataclass(frozen=True, slots=True, kw_only=True)
class CohereDecoderConfig(DecoderConfig):
    """Hold what ``CohereModel`` needs in addition to ``ModelInfo``."""

    logit_scale: float
    attention_bias: bool


def describe_cohere(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of Command R. Raises ``ConfigError``."""
    theta = config.get("rope_theta") or 500000.0
    return _info({**config, "rope_theta": theta}, "CohereForCausalLM", ())


def describe_cohere2(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of Command R7B or Command A. Raises ``ConfigError``."""
    return _info(config, "Cohere2ForCausalLM", ("sliding_window", "layer_types"))


def _info(config: dict[str, Any], architecture: str, reads: Collection[str]) -> ModelInfo:
    refuse_unread(config, {"attention_bias", "logit_scale", *reads}, architecture)
    refuse_activation(config)
    sizes = read_heads({key: value for key, value in config.items() if key != "head_dim"})  # transformers ignores it
    rope = read_rope(config, sizes.head_dim, read_int(config, "max_position_embeddings", 8192))
    layers = read_int(config, "num_hidden_layers")
    kinds = ["full_attention"] * layers
    if reads:
        kinds = layer_pattern(config, layers, every=read_int(config, "sliding_window_pattern", 4))
    known = {"full_attention": None, "sliding_attention": read_int(config, "sliding_window", 4096)}
    windows = read_layer_types({"layer_types": kinds}, layers, known)
    own = CohereDecoderConfig(
        intermediate_size=read_int(config, "intermediate_size"),
        norm_eps=read_float(config, "layer_norm_eps", 1e-5),
        rope=rope,
        windows=cut_windows(windows, rope.context_len),
        layer_ropes=tuple(rope if kind == "sliding_attention" else None for kind in kinds) if reads else (),
        tied=read_flag({"tie_word_embeddings": True, **config}, "tie_word_embeddings"),
        logit_scale=read_float(config, "logit_scale", 0.0625),
        attention_bias=read_flag(config, "attention_bias"),
    )
    return make_info(config, architecture, sizes, rope.context_len, own)
