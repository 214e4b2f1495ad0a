"""Describe Kimi Linear, whose layers attend over latents or keep states, from config.json alone. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dovetail.errors import ConfigError
from dovetail.interfaces.cache import CacheGroup, CacheGroupKind
from dovetail.interfaces.expert_shapes import ExpertsShape, RoutingRule
from dovetail.interfaces.mixer_shapes import KDA_NEEDS, StateShape
from dovetail.interfaces.model import ModelInfo
from dovetail.layers.rope import read_rope
from dovetail_models.deepseek_describe import LatentMoeConfig, LatentSizes
from dovetail_models.describe import HeadSizes, refuse_activation
from dovetail_models.mamba2_describe import conv_state, hybrid_info, read_state_layers
from dovetail_models.moe_describe import MIXTRAL_NAMES, extended, moe_config, moe_info
from dovetail_models.settings import read_flag, read_float, read_int, refuse_other, refuse_unread

ARCHITECTURE = "KimiLinearForCausalLM"
_NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""Map the names of settings to those that other models have, which are read too."""
_LINEAR = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""Map settings of ``linear_attn_config``, which published checkpoints have, to those that transformers writes."""
_READS = frozenset({*_NAMES.values(), *_NAMES, "layer_types", "first_k_dense_replace", "routed_scaling_factor"})


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiLinearSizes(LatentMoeConfig):
    """Hold what ``KimiLinearModel`` needs in addition to ``LatentMoeConfig``. ``states`` says of each layer whether it keeps
    states; the others attend. ``linear_heads`` and ``linear_head_dim`` are the heads of the former, ``conv_width`` the width
    of their convolutions. ``dense_name`` is the name of an MLP in the checkpoint."""

    states: tuple[bool, ...]
    linear_heads: int
    linear_head_dim: int
    conv_width: int
    dense_name: str


def describe_kimi_linear(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of Kimi Linear. Raises ``ConfigError``."""
    given, published = _with_common_names(config)
    refuse_unread(given, _READS | {"topk_group"}, ARCHITECTURE)
    refuse_activation(given)
    heads = read_int(given, "num_attention_heads", 32)
    fixed = {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1}
    refuse_other(given, {**fixed, "num_key_value_heads": heads, "use_grouped_topk": True}, ARCHITECTURE)
    layers = read_int(given, "num_hidden_layers", 27)
    given = {"intermediate_size": 9216, **given, "num_hidden_layers": layers}
    latent = LatentSizes(
        q_lora_rank=None if given.get("q_lora_rank") is None else read_int(given, "q_lora_rank"),
        kv_lora_rank=read_int(given, "kv_lora_rank", 512),
        qk_nope_head_dim=read_int(given, "qk_nope_head_dim", 128),
        qk_rope_head_dim=read_int(given, "qk_rope_head_dim", 64),
        v_head_dim=read_int(given, "v_head_dim", 128),
        scale=(read_int(given, "qk_nope_head_dim", 128) + read_int(given, "qk_rope_head_dim", 64)) ** -0.5,
        interleaved=False,  # nothing is rotated
    )
    rope = read_rope({}, latent.qk_rope_head_dim, read_int(given, "max_position_embeddings", 1048576))
    common = moe_config(given, _experts(given), rope, sparse=_sparse(given, layers), eps=1e-5)
    own = extended(
        KimiLinearSizes,
        replace(common, rope=None, names=replace(MIXTRAL_NAMES, shared="shared_experts")),
        latent=latent,
        states=_states(given, layers),
        linear_heads=read_int(given, "linear_num_heads", 32),
        linear_head_dim=read_int(given, "linear_head_dim", 128),
        conv_width=read_int(given, "linear_conv_kernel_dim", 4, minimum=2),
        dense_name="mlp" if published else MIXTRAL_NAMES.layer,
    )
    size = latent.kv_lora_rank + latent.qk_rope_head_dim
    info = moe_info(given, ARCHITECTURE, HeadSizes(heads, 1, size), rope.context_len, own)
    group = CacheGroup(layers, 1, size, CacheGroupKind.LATENT, value_dim=latent.kv_lora_rank)
    number, dim = own.linear_heads, own.linear_head_dim
    kept = (
        conv_state(own.conv_width, *[(number, dim)] * 3),
        StateShape((number, dim, dim), "float32", ((number, 1),)),
    )
    return hybrid_info(
        replace(info, cache_groups=(group,)), own.states, ("the heads of linear attention", number), kept, KDA_NEEDS
    )


def _with_common_names(config: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the settings by the names that transformers writes, and whether they are in the format of published
    checkpoints. Raises ``ConfigError``."""
    given = {common: config[name] for name, common in _NAMES.items() if name in config}
    linear = config.get("linear_attn_config")
    if linear is not None and not isinstance(linear, Mapping):
        raise ConfigError(
            f"config.json: linear_attn_config is {linear!r:.80}; needed: the settings of linear attention"
        )
    linear = linear or {}
    given |= {common: linear[name] for name, common in _LINEAR.items() if name in linear}
    lists = {key: linear[key] for key in ("full_attn_layers", "kda_layers") if key in linear}
    return {**config, **given, **lists}, bool(linear)


def _states(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Return which layers keep states: by ``layer_types``, by the lists of published checkpoints, which count layers from 1,
    or, without any, all but every fourth one after the first. Raises ``ConfigError``."""
    if config.get("layer_types") is not None:
        return read_state_layers(config)
    full, linear = config.get("full_attn_layers"), config.get("kda_layers")
    if full is None and linear is None:
        return tuple(index == 0 or index % 4 != 0 for index in range(layers))
    both = [*full, *linear] if isinstance(full, list) and isinstance(linear, list) else []
    if sorted(map(str, both)) != sorted(map(str, range(1, layers + 1))):
        raise ConfigError(
            f"config.json: linear_attn_config has full_attn_layers {full!r:.80} and kda_layers {linear!r:.80}; needed: lists that "
            f"have each layer from 1 to {layers} once"
        )
    assert isinstance(linear, list)
    return tuple(index + 1 in linear for index in range(layers))


def _sparse(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Return which layers have experts. Raises ``ConfigError``."""
    types = config.get("mlp_layer_types")
    if types is None:
        first = read_int(config, "first_k_dense_replace", 1, minimum=0)
        return tuple(index >= first for index in range(layers))
    if not isinstance(types, list) or len(types) != layers or any(kind not in ("dense", "sparse") for kind in types):
        raise ConfigError(
            f"config.json: mlp_layer_types is {types!r:.200}; needed: a list of {layers} of 'dense', 'sparse'"
        )
    return tuple(kind == "sparse" for kind in types)


def _experts(config: Mapping[str, Any]) -> ExpertsShape:
    rule = RoutingRule(
        read_int(config, "num_local_experts", 256),
        read_int(config, "num_experts_per_tok", 8),
        scoring="sigmoid",
        renormalize=read_flag(config, "norm_topk_prob", default=True),
        scale=read_float(config, "routed_scaling_factor", 2.446),
        corrected=True,
        groups=read_int(config, "n_group", 1),
        groups_kept=read_int(config, "topk_group", 1),
        float32=True,
    )
    size = read_int(config, "moe_intermediate_size", 1024)
    shared = size * read_int(config, "n_shared_experts", 1, minimum=0)
    return ExpertsShape(read_int(config, "hidden_size"), size, rule, shared_size=shared)
