"""Describe the text model of Llama 4 from config.json alone. Does not import torch.

Some layers attend within chunks of the text only. In the first chunk, that is the same as causal attention: the context
is therefore limited to one chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dovetail.errors import ConfigError
from dovetail.interfaces.expert_shapes import ExpertsShape, RoutingRule
from dovetail.interfaces.model import ModelInfo
from dovetail.layers.rope import RopeConfig
from dovetail_models.describe import read_heads, refuse_activation
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
from dovetail_models.settings import read_flag, read_float, read_int, refuse_unread

ARCHITECTURE = "Llama4ForCausalLM"
_READS = COUNTS | {
    "attention_bias",
    "attention_chunk_size",
    "layer_types",
    "no_rope_layers",
    "use_qk_norm",
}
_NAMES = ExpertNames(layer="feed_forward", router="router", shared="shared_expert")


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama4Sizes(MoeConfig):
    """Hold what ``Llama4Model`` needs in addition to ``MoeConfig``.

    In layers that rotate, heads of queries and keys are normalised without weights, if ``unweighted_norm``. In the
    others, the query at position p is multiplied by ``1 + tuning * log(1 + floor((p + 1) / tuning_step))``, if
    ``tuning`` is not 0. ``multimodal``: the checkpoint also has a model for images.
    """

    unweighted_norm: bool
    tuning: float
    tuning_step: int
    multimodal: bool


def describe_llama4(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of the text model of Llama 4, alone or within a checkpoint for images. Raises
    ``ConfigError``."""
    text = config.get("text_config")
    if text is None:
        return _describe(config, multimodal=False)
    if not isinstance(text, Mapping):
        raise ConfigError(f"config.json: text_config is {text!r}; needed: the settings of the text model")
    common = ("dtype", "torch_dtype", "eos_token_id", "quantization_config")
    return _describe({**text, **{key: config[key] for key in common if key in config}}, multimodal=True)


def _describe(config: dict[str, Any], *, multimodal: bool) -> ModelInfo:
    refuse_unread(config, _READS, ARCHITECTURE)
    refuse_activation(config)
    sizes = read_heads(config, default_kv_heads=8, default_head_dim=128)
    rotates = _rotating_layers(config)
    rope = _limited(config, read_moe_rope(config, sizes, 5e5, 131072))
    norm = config.get("use_qk_norm") is None or read_flag(config, "use_qk_norm")
    if norm and rope.scale != 1.0:
        raise ConfigError(f"config.json: use_qk_norm with a {rope.kind} that scales queries is not implemented")
    size = read_int(config, "intermediate_size", 8192)
    rule = RoutingRule(
        read_expert_count(config, 16), read_int(config, "num_experts_per_tok", 1), scoring="sigmoid", after_choice=True
    )
    hidden, bias = read_int(config, "hidden_size"), read_flag(config, "attention_bias")
    common = moe_config(
        {**config, "intermediate_size": read_int(config, "intermediate_size_mlp", 16384)},
        ExpertsShape(hidden, size, rule, scaled_input=True, shared_size=size),
        rope,
        sparse=_sparse_layers(config),
        eps=1e-5,
    )
    layer_ropes = tuple(rope if one else None for one in rotates)
    common = replace(common, qkv_bias=bias, out_bias=bias, names=_NAMES, rotates_pairs=True, layer_ropes=layer_ropes)
    tuned = config.get("attn_temperature_tuning")  # published checkpoints have the number 4
    own = extended(
        Llama4Sizes,
        common,
        unweighted_norm=norm,
        tuning=read_float(config, "attn_scale", 0.1) if tuned or tuned is None else 0.0,
        tuning_step=read_int(config, "floor_scale", 8192),
        multimodal=multimodal,
    )
    return moe_info(config, ARCHITECTURE, sizes, rope.context_len, own)


def _limited(config: Mapping[str, Any], rope: RopeConfig) -> RopeConfig:
    """Return ``rope`` for a context of one chunk, if there are layers with chunks."""
    layers = read_int(config, "num_hidden_layers")
    types = config.get("layer_types") or [
        "chunked_attention" if rotates else "full_attention" for rotates in _rotating_layers(config)
    ]
    if not isinstance(types, list) or len(types) != layers or set(types) - {"chunked_attention", "full_attention"}:
        raise ConfigError(
            f"config.json: layer_types is {types!r}; needed: a list of {layers} of chunked_attention, full_attention"
        )
    if "chunked_attention" not in types or config.get("attention_chunk_size", 8192) is None:
        return rope
    chunk = read_int(config, "attention_chunk_size", 8192)
    return replace(rope, context_len=min(rope.context_len, chunk))


def _rotating_layers(config: Mapping[str, Any]) -> list[bool]:
    """Return which layers rotate queries and keys."""
    layers, given = read_int(config, "num_hidden_layers"), config.get("no_rope_layers")
    if not given:
        every = read_int(config, "no_rope_layer_interval", 4)
        return [(index + 1) % every != 0 for index in range(layers)]
    if not isinstance(given, list) or len(given) < layers or set(given) - {0, 1}:
        raise ConfigError(f"config.json: no_rope_layers is {given!r}; needed: a list of {layers} of 0 and 1")
    return [bool(one) for one in given[:layers]]


def _sparse_layers(config: Mapping[str, Any]) -> list[bool]:
    """Return which layers have experts."""
    layers, given = read_int(config, "num_hidden_layers"), config.get("moe_layers")
    if given is None:
        step = read_int(config, "interleave_moe_layer_step", 1)
        return [(index + 1) % step == 0 for index in range(layers)]
    if not isinstance(given, list) or not all(isinstance(index, int) for index in given):
        raise ConfigError(f"config.json: moe_layers is {given!r}; allowed: a list of indices of layers")
    return [index in given for index in range(layers)]
