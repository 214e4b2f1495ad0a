"""Describe Qwen3-Next and Qwen3.5 from config.json alone. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dovetail.errors import ConfigError
from dovetail.interfaces.cache import CacheGroup
from dovetail.interfaces.expert_shapes import ExpertsShape, RoutingRule
from dovetail.interfaces.features import Feature
from dovetail.interfaces.mixer_shapes import DELTA_NEEDS, DeltaShape, StateShape
from dovetail.interfaces.model import ModelInfo
from dovetail_models.describe import HeadSizes, read_heads, refuse_activation
from dovetail_models.mamba2_describe import conv_state
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

_READ = COUNTS | {"attention_bias", "layer_types", "partial_rotary_factor", "shared_expert_intermediate_size"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridMoeConfig(MoeConfig):
    """Hold what ``Qwen3NextModel`` needs in addition to ``ModelInfo``. ``linear`` says of each layer whether it is a gated
    delta net; the others attend. ``delta`` are the heads of gated delta nets, ``conv_width`` the width of their
    convolution. ``by_head``: see ``DeltaNetShape``. ``multimodal``: the checkpoint is one for images, of which this is the
    text model."""

    linear: tuple[bool, ...]
    delta: DeltaShape
    conv_width: int
    by_head: bool = True
    multimodal: bool = False


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
        groups.append(CacheGroup.of_states(linear.count(True), _states(info.config)))
    split = (*info.split_sizes, ("linear_num_key_heads", info.config.delta.key_heads))
    # the bits of a recurrence depend on how a prompt is divided into chunks
    offers = info.offers - {Feature.MODEL_BATCH_INVARIANT}
    needs = info.needs | (DELTA_NEEDS if any(linear) else frozenset())
    return replace(info, cache_groups=tuple(groups), split_sizes=split, needs=needs, offers=offers)


def _states(config: HybridMoeConfig) -> tuple[StateShape, ...]:
    """Return the states of a gated delta net: the last inputs of the convolution, and the state of the rule."""
    heads = config.delta
    return (
        conv_state(config.conv_width, (heads.key_heads, heads.width // heads.key_heads)),
        StateShape(heads.state, "float32", ((heads.key_heads, heads.value_heads // heads.key_heads),)),
    )


def describe_qwen3_next(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of Qwen3-Next. Raises ``ConfigError``."""
    architecture = "Qwen3NextForCausalLM"
    refuse_unread(config, _READ | {"decoder_sparse_step", "mlp_only_layers", "norm_topk_prob"}, architecture)
    config = {"num_nextn_predict_layers": 1, **config}  # published checkpoints have one layer and do not say so
    rule = qwen_rule({"norm_topk_prob": True, **config}, 512, 10)
    return _info(config, architecture, _experts(config, rule), sparse_by_step(config), by_head=True)


def describe_qwen3_5(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of the text model of Qwen3.5, alone or within a checkpoint for images. Raises
    ``ConfigError``."""
    given, multimodal = _text_settings(config)
    given = _without_sections(given)
    architecture = "Qwen3_5ForCausalLM"
    refuse_unread(given, _READ - COUNTS, architecture)
    layers, hidden = read_int(given, "num_hidden_layers"), read_int(given, "hidden_size")
    unused = ExpertsShape(hidden, 1, RoutingRule(1, 1))  # no layer has experts
    return _info(given, architecture, unused, (False,) * layers, by_head=False, multimodal=multimodal)


def describe_qwen3_5_moe(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of the text model of Qwen3.5 with experts, alone. Raises ``ConfigError``."""
    architecture = "Qwen3_5MoeForCausalLM"
    config = _without_sections(config)
    refuse_unread(config, _READ, architecture)
    rule = qwen_rule({**config, "norm_topk_prob": True}, 256, 8)
    sparse = (True,) * read_int(config, "num_hidden_layers")
    return _info(config, architecture, _experts(config, rule), sparse, by_head=False)


def _text_settings(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """Return the settings of the text model, and whether the checkpoint has images too. Raises ``ConfigError``."""
    text = config.get("text_config")
    if text is None:
        return config, False
    if not isinstance(text, Mapping):
        raise ConfigError(f"config.json: text_config is {text!r}; needed: the settings of the text model")
    common = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "tie_word_embeddings")
    return {**text, **{key: config[key] for key in common if config.get(key) is not None}}, True


def _without_sections(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those that divide the rotation among time, height and width. The three are the same
    for every token of a text."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return dict(config)
    rope = {key: value for key, value in rope.items() if key not in ("mrope_section", "mrope_interleaved")}
    return {**config, "rope_parameters": rope}


def _experts(config: Mapping[str, Any], rule: RoutingRule) -> ExpertsShape:
    return ExpertsShape(
        read_int(config, "hidden_size"),
        read_int(config, "moe_intermediate_size", 512),
        rule,
        shared_size=read_int(config, "shared_expert_intermediate_size", 512),
        shared_gate=True,
    )


def _info(
    config: Mapping[str, Any],
    architecture: str,
    experts: ExpertsShape,
    sparse: tuple[bool, ...],
    *,
    by_head: bool,
    multimodal: bool = False,
) -> ModelInfo:
    refuse_activation(config)
    dense = not any(sparse)
    sizes: HeadSizes = read_heads(config, default_kv_heads=4 if dense else 2, default_head_dim=256)
    rope = read_moe_rope(config, sizes, 1e4, 32768, partial=0.25)
    common = moe_config(config, experts, rope, sparse=sparse)
    bias = read_flag(config, "attention_bias")
    common = replace(common, qkv_bias=bias, out_bias=bias, qk_norm=True, names=QWEN_NAMES)
    own = extended(
        HybridMoeConfig,
        common,
        linear=read_linear_layers(config),
        delta=read_delta_heads(config),
        conv_width=read_int(config, "linear_conv_kernel_dim", 4, minimum=2),
        by_head=by_head,
        multimodal=multimodal,
    )
    return with_states(moe_info(config, architecture, sizes, rope.context_len, own, predicts=True))
