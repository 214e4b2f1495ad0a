"""Describe OLMo 2 and OLMo 3 from config.json alone. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dovetail.interfaces.features import Feature
from dovetail.interfaces.model import ModelInfo
from dovetail.layers.rope import RopeConfig, read_rope
from dovetail_models.describe import (
    OFFERS,
    DecoderConfig,
    Windows,
    cut_windows,
    layer_pattern,
    make_info,
    read_heads,
    read_layer_types,
    read_ropes_by_type,
    refuse_activation,
)
from dovetail_models.settings import read_flag, read_float, read_int, refuse_unread

_POSITIONS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class OlmoConfig(DecoderConfig):
    """Hold what ``OlmoModel`` needs in addition to ``ModelInfo``."""

    attention_bias: bool = False


def describe_olmo2(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of OLMo 2. Raises ``ConfigError``."""
    refuse_unread(config, {"attention_bias"}, "Olmo2ForCausalLM")
    rope = read_rope(config, read_heads(config).head_dim, read_int(config, "max_position_embeddings", _POSITIONS))
    windows = (None,) * read_int(config, "num_hidden_layers")
    return _info(config, "Olmo2ForCausalLM", rope, windows)


def describe_olmo3(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of OLMo 3. Raises ``ConfigError``."""
    refuse_unread(config, {"attention_bias", "sliding_window", "layer_types"}, "Olmo3ForCausalLM")
    layers = read_int(config, "num_hidden_layers")
    positions, theta = read_int(config, "max_position_embeddings", _POSITIONS), config.get("rope_theta") or 500000.0
    ropes = read_ropes_by_type(config, read_heads(config).head_dim, positions, theta=theta, sliding_theta=theta)
    full = ropes["full_attention"]
    ropes["sliding_attention"] = replace(ropes["sliding_attention"], context_len=full.context_len)
    kinds = layer_pattern(config, layers, every=4)
    known = {"full_attention": None, "sliding_attention": read_int(config, "sliding_window", 4096)}
    windows = cut_windows(read_layer_types({"layer_types": kinds}, layers, known), full.context_len)
    return _info(config, "Olmo3ForCausalLM", full, windows, tuple(ropes[kind] for kind in kinds))


def _info(
    config: Mapping[str, Any],
    architecture: str,
    rope: RopeConfig,
    windows: Windows,
    layer_ropes: tuple[RopeConfig, ...] = (),
) -> ModelInfo:
    refuse_activation(config)
    own = OlmoConfig(
        intermediate_size=read_int(config, "intermediate_size"),
        norm_eps=read_float(config, "rms_norm_eps", 1e-5),
        rope=rope,
        windows=windows,
        layer_ropes=layer_ropes if set(layer_ropes) != {rope} else (),
        tied=read_flag(config, "tie_word_embeddings"),
        attention_bias=read_flag(config, "attention_bias"),
    )
    # ranks add up the squares of their shares with a sum whose order depends on the number of tokens
    offers = OFFERS - {Feature.MODEL_BATCH_INVARIANT}
    return make_info(config, architecture, read_heads(config), rope.context_len, own, offers=offers)
