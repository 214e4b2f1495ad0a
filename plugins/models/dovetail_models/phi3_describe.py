"""Describe Phi-3 and Phi-4 from config.json alone. Does not import torch."""

from __future__ import annotations

from typing import Any

from dovetail.interfaces.model import ModelInfo
from dovetail.layers.rope import read_rope
from dovetail_models.dense_describe import DenseConfig
from dovetail_models.describe import cut_windows, make_info, read_heads, refuse_activation
from dovetail_models.settings import read_flag, read_float, read_int, refuse_unread

ARCHITECTURE = "Phi3ForCausalLM"


def describe_phi3(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of Phi-3, Phi-3.5 mini or Phi-4. Raises ``ConfigError``."""
    refuse_unread(config, {"sliding_window", "partial_rotary_factor"}, ARCHITECTURE)
    refuse_activation(config)
    sizes = read_heads(config)
    rope = read_rope(_longrope(config), sizes.head_dim, read_int(config, "max_position_embeddings", 4096), 1.0)
    window = None if config.get("sliding_window") is None else read_int(config, "sliding_window")
    own = DenseConfig(
        intermediate_size=read_int(config, "intermediate_size"),
        norm_eps=read_float(config, "rms_norm_eps", 1e-5),
        rope=rope,
        windows=cut_windows((window,) * read_int(config, "num_hidden_layers"), rope.context_len),
        tied=read_flag(config, "tie_word_embeddings"),
    )
    return make_info(config, ARCHITECTURE, sizes, rope.context_len, own)


def _longrope(config: dict[str, Any]) -> dict[str, Any]:
    """Return ``config`` with the defaults of longrope. The first checkpoints call it ``yarn``."""
    for section in ("rope_parameters", "rope_scaling"):
        given = config.get(section)
        if isinstance(given, dict) and given.get("short_factor") is not None:
            kind = {key: "longrope" for key in ("rope_type", "type") if given.get(key) == "yarn"}
            length = config.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
            return {**config, section: {**given, **kind}, "original_max_position_embeddings": length or 4096}
    return config
