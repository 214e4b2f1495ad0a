"""Describe Falcon-H1 from config.json alone. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dovetail.errors import ConfigError
from dovetail.interfaces.cache import CacheGroup
from dovetail.interfaces.mixer_shapes import SSD_NEEDS
from dovetail.interfaces.model import ModelInfo
from dovetail.layers.rope import read_rope
from dovetail_models.dense_describe import DenseConfig
from dovetail_models.describe import make_info, read_heads, refuse_activation
from dovetail_models.mamba2_describe import Mamba2Sizes, hybrid_info, read_mamba_sizes
from dovetail_models.settings import read_flag, read_float, read_int, refuse_unread

ARCHITECTURE = "FalconH1ForCausalLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconH1Sizes(DenseConfig):
    """Hold what ``FalconH1Model`` needs in addition to ``DenseConfig``. What multiplies the input of attention and its keys
    is in ``attention_scale``, which multiplies logits of attention, and in ``attention_out``; what multiplies the
    input of the mixer is in ``projections``, the factors of its five projections."""

    mixer: Mamba2Sizes
    norm: str  # of the mixer, see ``layers.mamba.GatedNormOrder``
    projections: tuple[float, float, float, float, float]
    mixer_out: float
    attention_scale: float
    attention_out: float
    mlp_gate: float
    mlp_down: float
    embedding: float
    logits: float


def describe_falcon_h1(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of Falcon-H1. Raises ``ConfigError``."""
    refuse_unread(config, {"attention_bias", "mlp_bias", "embedding_multiplier"}, ARCHITECTURE)
    refuse_activation(config)
    sizes = read_heads(config, default_kv_heads=8)
    rope = read_rope(config, sizes.head_dim, read_int(config, "max_position_embeddings", 8192))
    layers, bias = read_int(config, "num_hidden_layers"), read_flag(config, "attention_bias")
    inner = None if config.get("mamba_d_ssm", 1024) is None else read_int(config, "mamba_d_ssm", 1024)
    mixer = read_mamba_sizes(config, inner=inner)
    mixer = replace(mixer, out_bias=read_flag(config, "projectors_bias"))
    enters, keys = read_float(config, "attention_in_multiplier", 1.0), read_float(config, "key_multiplier", 1.0)
    mixer_enters = read_float(config, "ssm_in_multiplier", 1.0)
    for name, factor, biased in (
        ("attention_in_multiplier", enters, bias),
        ("ssm_in_multiplier", mixer_enters, mixer.in_bias),
    ):
        if biased and factor != 1:
            raise ConfigError(f"config.json: {name} is {factor}, and the projections have biases; implemented: 1")
    gate, down = _factors(config, "mlp_multipliers", 2)
    parts = _factors(config, "ssm_multipliers", 5)
    first = config.get("mamba_norm_before_gate") is None or read_flag(config, "mamba_norm_before_gate")
    own = FalconH1Sizes(
        intermediate_size=read_int(config, "intermediate_size"),
        norm_eps=read_float(config, "rms_norm_eps", 1e-5),
        rope=rope,
        windows=(None,) * layers,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=read_flag(config, "mlp_bias"),
        tied=read_flag(config, "tie_word_embeddings"),
        mixer=mixer,
        norm=("norm first" if first else "gate first") if read_flag(config, "mamba_rms_norm") else "no norm",
        projections=(
            parts[0] * mixer_enters,
            parts[1] * mixer_enters,
            parts[2] * mixer_enters,
            parts[3] * mixer_enters,
            parts[4] * mixer_enters,
        ),
        mixer_out=read_float(config, "ssm_out_multiplier", 1.0),
        attention_scale=enters * enters * keys * sizes.head_dim**-0.5,
        attention_out=enters * read_float(config, "attention_out_multiplier", 1.0),
        mlp_gate=gate,
        mlp_down=down,
        embedding=read_float(config, "embedding_multiplier", 1.0),
        logits=read_float(config, "lm_head_multiplier", 1.0),
    )
    info = make_info(config, ARCHITECTURE, sizes, rope.context_len, own)
    groups = (*info.cache_groups, CacheGroup.of_states(layers, mixer.states))  # every layer attends and keeps a state
    info = hybrid_info(info, (False,) * layers, mixer.split, ())
    return replace(info, cache_groups=groups, needs=info.needs | SSD_NEEDS)


def _factors(config: Mapping[str, Any], key: str, count: int) -> list[float]:
    """Return a list of positive numbers, by default ones. Raises ``ConfigError``."""
    given = config.get(key)
    if given is None:
        return [1.0] * count
    if not isinstance(given, list | tuple) or len(given) != count:
        raise ConfigError(f"config.json: {key} is {given!r}; needed: a list of {count} numbers")
    return [read_float({key: each}, key, 1.0) for each in given]
