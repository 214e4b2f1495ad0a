"""Describe LFM2 from config.json alone. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.errors import ConfigError
from dovetail.interfaces.mixer_shapes import CONV_NEEDS
from dovetail.interfaces.model import ModelInfo
from dovetail.layers.rope import read_rope
from dovetail_models.dense_describe import DenseConfig
from dovetail_models.describe import make_info, read_heads
from dovetail_models.mamba2_describe import conv_state, hybrid_info, read_state_layers
from dovetail_models.settings import read_flag, read_float, read_int, refuse_unread

ARCHITECTURE = "Lfm2ForCausalLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2Sizes(DenseConfig):
    """Hold what ``Lfm2Model`` needs in addition to ``DenseConfig``. ``states`` says of each layer whether it has a short
    convolution over ``conv_width`` tokens; the others attend."""

    states: tuple[bool, ...]
    conv_width: int
    conv_bias: bool


def describe_lfm2(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of LFM2. Raises ``ConfigError``."""
    refuse_unread(config, {"layer_types"}, ARCHITECTURE)
    sizes = read_heads(config, default_kv_heads=8)
    with_theta = config if config.get("rope_theta") else {**config, "rope_theta": 1e6}
    rope = read_rope(with_theta, sizes.head_dim, read_int(config, "max_position_embeddings", 128_000))
    states = _conv_layers(config)
    own = Lfm2Sizes(
        intermediate_size=_intermediate_size(config),
        norm_eps=read_float(config, "norm_eps", 1e-5),
        rope=rope,
        windows=(None,) * len(states),
        qk_norm=True,
        tied=read_flag(config, "tie_embedding" if "tie_embedding" in config else "tie_word_embeddings", default=True),
        states=states,
        conv_width=read_int(config, "conv_L_cache", 3, minimum=2),
        conv_bias=read_flag(config, "conv_bias"),
    )
    info = make_info(config, ARCHITECTURE, sizes, rope.context_len, own)
    kept = (conv_state(own.conv_width, (info.hidden_size, 1)),)
    return hybrid_info(info, states, ("hidden_size", info.hidden_size), kept, CONV_NEEDS)


def _conv_layers(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return which layers have a short convolution, by ``layer_types`` or the older ``full_attn_idxs``."""
    layers, given = read_int(config, "num_hidden_layers"), config.get("full_attn_idxs")
    if config.get("layer_types") is not None:
        return read_state_layers(config)
    if given is None:
        return (False,) * layers
    if not isinstance(given, list) or not all(isinstance(index, int) for index in given):
        raise ConfigError(f"config.json: full_attn_idxs is {given!r}; needed: a list of indices of layers")
    return tuple(index not in given for index in range(layers))


def _intermediate_size(config: Mapping[str, Any]) -> int:
    """Return the size of the MLP. Unless ``block_auto_adjust_ff_dim`` is false, it is two thirds of the given size, times a
    factor, rounded up to a multiple."""
    size = read_int(config, "block_ff_dim" if "block_ff_dim" in config else "intermediate_size", 12288)
    if not read_flag(config, "block_auto_adjust_ff_dim", default=True):
        return size
    size = int(2 * size / 3)
    if "block_ffn_dim_multiplier" in config and config["block_ffn_dim_multiplier"] is None:
        return size
    multiple = read_int(config, "block_multiple_of", 256)
    return multiple * -(-int(read_float(config, "block_ffn_dim_multiplier", 1.0) * size) // multiple)
