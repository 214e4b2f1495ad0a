"""Describe SmolLM 3 from config.json alone: Llama's layers, some of which do not rotate. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.errors import ConfigError
from dovetail.interfaces.model import ModelInfo
from dovetail.layers.rope import read_rope
from dovetail_models.dense_describe import DenseConfig
from dovetail_models.describe import Windows, cut_windows, make_info, read_heads, read_layer_types, refuse_activation
from dovetail_models.settings import read_flag, read_float, read_int, refuse_unread

ARCHITECTURE = "SmolLM3ForCausalLM"


def describe_smollm3(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of SmolLM 3. Raises ``ConfigError``."""
    reads = {"attention_bias", "mlp_bias", "no_rope_layers", "layer_types", "sliding_window", "use_sliding_window"}
    refuse_unread(config, reads, ARCHITECTURE)
    refuse_activation(config)
    sizes = read_heads(config, default_kv_heads=4)
    rotates = _rotates(config, read_int(config, "num_hidden_layers"))
    positions = read_int(config, "max_position_embeddings", 32768)
    rope = read_rope({"rope_theta": 2000000.0, **config}, sizes.head_dim, positions)
    bias = read_flag(config, "attention_bias")
    own = DenseConfig(
        intermediate_size=read_int(config, "intermediate_size"),
        norm_eps=read_float(config, "rms_norm_eps", 1e-6),
        rope=rope,
        layer_ropes=tuple(rope if one else None for one in rotates),
        windows=cut_windows(_windows(config, rotates), rope.context_len),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=read_flag(config, "mlp_bias"),
        tied=read_flag(config, "tie_word_embeddings", default=True),
    )
    return make_info(config, ARCHITECTURE, sizes, rope.context_len, own)


def _rotates(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Return whether each layer rotates: ``no_rope_layers`` has a 1 for those that do, and 0 for the others."""
    given = config.get("no_rope_layers")
    if given is None:
        interval = read_int(config, "no_rope_layer_interval", 4)
        return tuple((index + 1) % interval != 0 for index in range(layers))
    if not isinstance(given, list) or len(given) < layers or any(one not in (0, 1) for one in given):
        raise ConfigError(
            f"config.json: no_rope_layers is {given!r}; needed: for each of {layers} layers 1, if it rotates, or 0"
        )
    return tuple(bool(one) for one in given[:layers])


def _windows(config: Mapping[str, Any], rotates: tuple[bool, ...]) -> Windows:
    used = read_flag(config, "use_sliding_window") and config.get("sliding_window") is not None
    window = read_int(config, "sliding_window") if used else None
    if config.get("layer_types") is None:
        return tuple(None if one else window for one in rotates)
    known = {"full_attention": None} | ({"sliding_attention": window} if used else {})
    hint = "full_attention, and sliding_attention where use_sliding_window is true and there is a sliding_window"
    return read_layer_types(config, len(rotates), known, hint)
