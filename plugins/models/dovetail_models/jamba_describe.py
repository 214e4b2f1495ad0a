"""Describe Jamba from config.json alone. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dovetail.errors import ConfigError
from dovetail.interfaces.expert_shapes import ExpertsShape, RoutingRule
from dovetail.interfaces.mixer_shapes import SCAN_NEEDS, StateShape
from dovetail.interfaces.model import ModelInfo
from dovetail_models.describe import read_heads, refuse_activation
from dovetail_models.mamba2_describe import conv_state, hybrid_info
from dovetail_models.moe_describe import (
    COUNTS,
    ExpertNames,
    MoeConfig,
    extended,
    moe_config,
    moe_info,
    read_expert_count,
    read_moe_rope,
)
from dovetail_models.settings import read_flag, read_int, refuse_unread

ARCHITECTURE = "JambaForCausalLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1Sizes:
    """Hold the sizes and variants of a mixer: the fields of ``layers.mamba1.Mamba1Shape`` without the hidden size."""

    inner_size: int
    state_size: int
    rank: int
    conv_width: int
    conv_bias: bool
    bias: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class JambaSizes(MoeConfig):
    """Hold what ``JambaModel`` needs in addition to ``MoeConfig``. ``states`` says of each layer whether it keeps states;
    the others attend."""

    mixer: Mamba1Sizes
    states: tuple[bool, ...]


def describe_jamba(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of Jamba. Raises ``ConfigError``."""
    refuse_unread(config, COUNTS, ARCHITECTURE)
    refuse_activation(config)
    sizes, layers = read_heads(config, default_kv_heads=8), read_int(config, "num_hidden_layers")
    attends = _periodic(config, "attn_layer", 8, 4, layers)
    count, hidden = read_expert_count(config, 16), read_int(config, "hidden_size")
    sparse = tuple(count > 1 and each for each in _periodic(config, "expert_layer", 2, 1, layers))
    experts = ExpertsShape(
        hidden, read_int(config, "intermediate_size"), RoutingRule(count, read_int(config, "num_experts_per_tok", 2))
    )
    rank = config.get("mamba_dt_rank")
    mixer = Mamba1Sizes(
        inner_size=read_int(config, "mamba_expand", 2) * hidden,
        state_size=read_int(config, "mamba_d_state", 16),
        rank=-(-hidden // 16) if rank in (None, "auto") else read_int(config, "mamba_dt_rank"),
        conv_width=read_int(config, "mamba_d_conv", 4, minimum=2),
        conv_bias=read_flag(config, "mamba_conv_bias", default=True),
        bias=read_flag(config, "mamba_proj_bias"),
    )
    context_len = read_int(config, "max_position_embeddings", 262144)
    common = moe_config(config, experts, read_moe_rope(config, sizes, 1e4, context_len), sparse=sparse)
    names = ExpertNames(layer="feed_forward", router="router")
    common = replace(common, rope=None, names=names)
    states = tuple(not each for each in attends)
    own = extended(JambaSizes, common, mixer=mixer, states=states)
    info = moe_info(config, ARCHITECTURE, sizes, context_len, own)
    channels = mixer.inner_size, 1
    kept = (
        conv_state(mixer.conv_width, channels),
        StateShape((mixer.inner_size, mixer.state_size), "float32", (channels,)),
    )
    return hybrid_info(info, states, ("the number of channels of mixers", mixer.inner_size), kept, SCAN_NEEDS)


def _periodic(config: Mapping[str, Any], key: str, period: int, offset: int, layers: int) -> tuple[bool, ...]:
    """Return which layers are those at ``{key}_offset`` in every ``{key}_period``; the numbers are defaults. Raises
    ``ConfigError``."""
    period, offset = read_int(config, f"{key}_period", period), read_int(config, f"{key}_offset", offset, minimum=0)
    if offset >= period:
        raise ConfigError(f"config.json: {key}_offset is {offset}, {key}_period {period}; the first must be smaller")
    return tuple(index % period == offset for index in range(layers))
