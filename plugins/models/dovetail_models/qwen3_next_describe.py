"""Describe Qwen3-Next from config.json alone. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dovetail.errors import ConfigError
from dovetail.interfaces.cache import CacheGroup, CacheGroupKind
from dovetail.interfaces.expert_shapes import ExpertsShape
from dovetail.interfaces.features import Feature
from dovetail.interfaces.mixer_shapes import DeltaShape
from dovetail.interfaces.model import ModelInfo
from dovetail_models.describe import HeadSizes, read_heads, refuse_activation
from dovetail_models.moe_describe import (
    COUNTS,
    QWEN_NAMES,
    MoeConfig,
    extended,
    moe_config,
    moe_info,
    qwen_rule,
    read_moe_rope,
    sparse_by_step,
)
from dovetail_models.settings import read_flag, read_int, refuse_unread

_ARCHITECTURE = "Qwen3NextForCausalLM"
_READ = COUNTS | {
    "attention_bias",
    "decoder_sparse_step",
    "layer_types",
    "mlp_only_layers",
    "norm_topk_prob",
    "partial_rotary_factor",
    "shared_expert_intermediate_size",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridMoeConfig(MoeConfig):
    """Hold what ``Qwen3NextModel`` needs in addition to ``ModelInfo``. ``linear`` says of each layer whether it is a gated
    delta net; the others attend. ``delta`` are the heads of gated delta nets, ``conv_width`` the width of their
    convolution. ``by_head``: see ``DeltaNetShape``."""

    linear: tuple[bool, ...]
    delta: DeltaShape
    conv_width: int
    by_head: bool = True


def read_linear_layers(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return which layers are gated delta nets: by default all but every fourth one. Raises ``ConfigError``."""
    layers, types = read_int(config, "num_hidden_layers"), config.get("layer_types")
    if types is None:
        every = read_int(config, "full_attention_interval", 4)
        return tuple((index + 1) % every != 0 for index in range(layers))
    allowed = ("linear_attention", "full_attention")
    if not isinstance(types, list) or len(types) != layers or any(each not in allowed for each in types):
        raise ConfigError(
            f"config.json: layer_types is {types!r}; needed: a list of {layers} types, each one of {', '.join(allowed)}"
        )
    return tuple(each == "linear_attention" for each in types)


def read_delta_heads(config: Mapping[str, Any]) -> DeltaShape:
    """Return the heads of gated delta nets. Raises ``ConfigError``."""
    keys, values = read_int(config, "linear_num_key_heads", 16), read_int(config, "linear_num_value_heads", 32)
    if values % keys:
        raise ConfigError(
            f"config.json: linear_num_value_heads is {values}, linear_num_key_heads {keys}; the first must be a multiple "
            "of the second"
        )
    key_dim, value_dim = read_int(config, "linear_key_head_dim", 128), read_int(config, "linear_value_head_dim", 128)
    return DeltaShape(keys, values, key_dim, value_dim)


def with_states(info: ModelInfo) -> ModelInfo:
    """Return the description of a model with a ``HybridMoeConfig`` whose cache groups are the layers that attend and the
    gated delta nets."""
    linear = info.config.linear
    groups = [CacheGroup(linear.count(False), info.num_kv_heads, info.head_dim)] if not all(linear) else []
    if any(linear):
        groups.append(CacheGroup(linear.count(True), 1, 1, CacheGroupKind.STATE))
    split = (*info.split_sizes, ("linear_num_key_heads", info.config.delta.key_heads))
    # the bits of a recurrence depend on how a prompt is divided into chunks
    offers = info.offers - {Feature.MODEL_BATCH_INVARIANT}
    return replace(info, cache_groups=tuple(groups), split_sizes=split, offers=offers)


def describe_qwen3_next(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of Qwen3-Next. Raises ``ConfigError``."""
    refuse_unread(config, _READ, _ARCHITECTURE)
    refuse_activation(config)
    sizes: HeadSizes = read_heads(config, default_kv_heads=2, default_head_dim=256)
    rope = read_moe_rope(config, sizes, 1e4, 32768, partial=0.25)
    experts = ExpertsShape(
        read_int(config, "hidden_size"),
        read_int(config, "moe_intermediate_size", 512),
        qwen_rule({"norm_topk_prob": True, **config}, 512, 10),
        shared_size=read_int(config, "shared_expert_intermediate_size", 512),
        shared_gate=True,
    )
    common = moe_config(config, experts, rope, sparse=sparse_by_step(config))
    bias = read_flag(config, "attention_bias")
    common = replace(common, qkv_bias=bias, out_bias=bias, qk_norm=True, names=QWEN_NAMES)
    own = extended(
        HybridMoeConfig,
        common,
        linear=read_linear_layers(config),
        delta=read_delta_heads(config),
        conv_width=read_int(config, "linear_conv_kernel_dim", 4, minimum=2),
    )
    return with_states(moe_info(config, _ARCHITECTURE, sizes, rope.context_len, own))
