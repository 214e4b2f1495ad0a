"""Describe Bamba, whose layers attend or keep states, from config.json alone. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dovetail.errors import ConfigError
from dovetail.interfaces.model import ModelInfo
from dovetail.layers.rope import read_rope
from dovetail_models.dense_describe import DenseConfig
from dovetail_models.describe import make_info, read_heads, refuse_activation
from dovetail_models.mamba2_describe import Mamba2Sizes, hybrid_info, read_mamba_sizes
from dovetail_models.settings import read_flag, read_float, read_int, refuse_unread

ARCHITECTURE = "BambaForCausalLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class BambaSizes(DenseConfig):
    """Hold what ``BambaModel`` needs in addition to ``DenseConfig``. ``states`` says of each layer whether it keeps
    states; the others attend."""

    mixer: Mamba2Sizes
    states: tuple[bool, ...]


def describe_bamba(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of Bamba. Raises ``ConfigError``."""
    refuse_unread(config, {"attention_bias", "mlp_bias", "layer_types", "partial_rotary_factor"}, ARCHITECTURE)
    refuse_activation(config)
    sizes, layers = read_heads(config, default_kv_heads=8), read_int(config, "num_hidden_layers", 32)
    rope = read_rope(config, sizes.head_dim, read_int(config, "max_position_embeddings", 262144), 0.5)
    given = config.get("attn_rotary_emb")
    if given not in (None, rope.rotary_dim):
        raise ConfigError(
            f"config.json: attn_rotary_emb is {given!r}; implemented: {rope.rotary_dim}, partial_rotary_factor times head_dim"
        )
    attends = config.get("attn_layer_indices") or []
    if not isinstance(attends, list) or not all(isinstance(each, int) and 0 <= each < layers for each in attends):
        raise ConfigError(
            f"config.json: attn_layer_indices is {attends!r}; allowed: a list of layers from 0 to {layers - 1}"
        )
    bias, mixer = read_flag(config, "attention_bias"), read_mamba_sizes(config)
    own = BambaSizes(
        intermediate_size=read_int(config, "intermediate_size", 14336),
        norm_eps=read_float(config, "rms_norm_eps", 1e-5),
        rope=rope,
        windows=(None,) * layers,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=read_flag(config, "mlp_bias"),
        tied=read_flag(config, "tie_word_embeddings"),
        mixer=mixer,
        states=tuple(index not in attends for index in range(layers)),
    )
    info = make_info(config, ARCHITECTURE, sizes, rope.context_len, own)
    return hybrid_info(info, own.states, mixer.split, mixer.states)
