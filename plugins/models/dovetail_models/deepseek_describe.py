"""Describe models with latent attention from config.json alone: DeepSeek-V2, DeepSeek-V3 (also R1 and Kimi K2) and
GLM-4.7-Flash. Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dovetail.errors import ConfigError
from dovetail.interfaces.cache import CacheGroup, CacheGroupKind
from dovetail.interfaces.expert_shapes import ExpertsShape, RoutingRule
from dovetail.interfaces.model import ModelInfo
from dovetail.layers.rope import RopeConfig, RopeKind, read_rope
from dovetail_models.describe import HeadSizes, refuse_activation
from dovetail_models.moe_describe import COUNTS, MoeConfig, extended, moe_config, moe_info
from dovetail_models.settings import read_flag, read_float, read_int, refuse_other, refuse_unread

_READS = COUNTS | {
    "attention_bias",
    "first_k_dense_replace",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "routed_scaling_factor",
    "scoring_func",
    "topk_group",
}


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Hold the sizes of latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). ``q_lora_rank`` is None if queries
    are projected from the hidden state directly. ``scale`` multiplies the attention logits. ``interleaved``: the elements
    (0, 1), (2, 3) and so on of the rotated part are rotated together, otherwise the halves are. ``bias``: the first
    projections and the output projection have biases."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scale: float
    interleaved: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentMoeConfig(MoeConfig):
    """Hold what ``LatentMoeModel`` needs in addition to ``ModelInfo``."""

    latent: LatentSizes


@dataclass(frozen=True, slots=True)
class _Defaults:
    """Hold the architecture and its values of absent keys, as in transformers."""

    architecture: str
    max_positions: int
    q_lora_rank: int = 1536
    qk_nope_head_dim: int = 128
    v_head_dim: int = 128
    expert_size: int = 2048
    shared_experts: int = 1
    eps: float = 1e-6


_V2 = _Defaults("DeepseekV2ForCausalLM", 2048, expert_size=1407, shared_experts=2)
_V3 = _Defaults("DeepseekV3ForCausalLM", 4096)
_GLM_LITE = _Defaults(
    "Glm4MoeLiteForCausalLM",
    202752,
    q_lora_rank=768,
    qk_nope_head_dim=192,
    v_head_dim=256,
    expert_size=1536,
    eps=1e-5,
)


def describe_deepseek_v2(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of DeepSeek-V2, V2-Lite or Coder-V2. Raises ``ConfigError``."""
    plain = {"scoring_func": "softmax", "norm_topk_prob": False, "rope_interleave": True}
    refuse_other(config, plain, _V2.architecture)
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(
            f"config.json: topk_method is {method!r:.80}; implemented in {_V2.architecture}: greedy, group_limited_greedy"
        )
    grouped = method == "group_limited_greedy"
    rule = RoutingRule(
        read_int(config, "n_routed_experts", 64),
        read_int(config, "num_experts_per_tok"),
        scale=read_float(config, "routed_scaling_factor", 1.0),
        groups=read_int(config, "n_group") if grouped else 1,
        groups_kept=read_int(config, "topk_group") if grouped else 1,
        group_top=1,
        float32=True,
    )
    return _describe(config, _V2, rule, _sparse_after(config, 0))


def describe_deepseek_v3(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of DeepSeek-V3, DeepSeek-R1 or Kimi K2. Raises ``ConfigError``."""
    rule = _corrected_rule(config, _V3, experts=256, top_k=8, scale=2.5, groups=8, groups_kept=4)
    return _describe(config, _V3, rule, _sparse_after(config, 3), predicts=True)


def describe_glm4_moe_lite(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of GLM-4.7-Flash. Raises ``ConfigError``."""
    rule = _corrected_rule(config, _GLM_LITE, experts=64, top_k=4, scale=1.8, groups=1, groups_kept=1)
    types, layers = config.get("mlp_layer_types"), read_int(config, "num_hidden_layers")
    if types is None:
        return _describe(config, _GLM_LITE, rule, _sparse_after(config, 1), predicts=True)
    if not isinstance(types, list) or len(types) != layers or any(kind not in ("dense", "sparse") for kind in types):
        raise ConfigError(
            f"config.json: mlp_layer_types is {types!r:.200}; needed: a list of {layers} of 'dense', 'sparse'"
        )
    return _describe(config, _GLM_LITE, rule, [kind == "sparse" for kind in types], predicts=True)


def _corrected_rule(
    config: Mapping[str, Any],
    own: _Defaults,
    *,
    experts: int,
    top_k: int,
    scale: float,
    groups: int,
    groups_kept: int,
) -> RoutingRule:
    """Return the rule of DeepSeek-V3; the numbers are the defaults of absent keys."""
    refuse_other(config, {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}, own.architecture)
    return RoutingRule(
        read_int(config, "n_routed_experts", experts),
        read_int(config, "num_experts_per_tok", top_k),
        scoring="sigmoid",
        renormalize=read_flag(config, "norm_topk_prob", default=True),
        scale=read_float(config, "routed_scaling_factor", scale),
        corrected=True,
        groups=read_int(config, "n_group", groups),
        groups_kept=read_int(config, "topk_group", groups_kept),
        float32=True,
    )


def _sparse_after(config: Mapping[str, Any], default: int) -> list[bool]:
    """Return which layers have experts: all from ``first_k_dense_replace`` on."""
    first = read_int(config, "first_k_dense_replace", default, minimum=0)
    return [index >= first for index in range(read_int(config, "num_hidden_layers"))]


def _describe(
    config: Mapping[str, Any], own: _Defaults, rule: RoutingRule, sparse: Sequence[bool], *, predicts: bool = False
) -> ModelInfo:
    refuse_unread(config, _READS, own.architecture)
    refuse_activation(config)
    heads = read_int(config, "num_attention_heads")
    refuse_other(config, {"moe_layer_freq": 1, "num_key_value_heads": heads}, own.architecture)
    rotated = read_int(config, "qk_rope_head_dim", 64)
    rope = read_rope(config, rotated, read_int(config, "max_position_embeddings", own.max_positions))
    size = read_int(config, "moe_intermediate_size", own.expert_size)
    without = "n_shared_experts" in config and config["n_shared_experts"] is None
    shared = 0 if without else size * read_int(config, "n_shared_experts", own.shared_experts, minimum=0)
    experts = ExpertsShape(read_int(config, "hidden_size"), size, rule, shared_size=shared)
    common = moe_config(config, experts, rope, sparse=sparse, eps=own.eps)
    latent = _read_latent(config, own, rope)
    sizes = HeadSizes(heads, 1, latent.kv_lora_rank + rotated)
    described = extended(LatentMoeConfig, common, latent=latent)
    info = moe_info(config, own.architecture, sizes, rope.context_len, described, predicts=predicts)
    return replace(info, cache_groups=(_cache_group(info.num_layers, latent),))


def _cache_group(layers: int, latent: LatentSizes) -> CacheGroup:
    size = latent.kv_lora_rank + latent.qk_rope_head_dim
    return CacheGroup(layers, 1, size, CacheGroupKind.LATENT, value_dim=latent.kv_lora_rank)


def _read_latent(config: Mapping[str, Any], own: _Defaults, rope: RopeConfig) -> LatentSizes:
    low_rank = "q_lora_rank" not in config or config["q_lora_rank"] is not None
    unrotated = read_int(config, "qk_nope_head_dim", own.qk_nope_head_dim)
    bias = read_flag(config, "attention_bias")
    if bias and not low_rank:
        raise ConfigError(
            "config.json: attention_bias is True and q_lora_rank is null; allowed: attention_bias with a q_lora_rank"
        )
    return LatentSizes(
        q_lora_rank=read_int(config, "q_lora_rank", own.q_lora_rank) if low_rank else None,
        kv_lora_rank=read_int(config, "kv_lora_rank", 512),
        qk_nope_head_dim=unrotated,
        qk_rope_head_dim=rope.head_dim,
        v_head_dim=read_int(config, "v_head_dim", own.v_head_dim),
        scale=(unrotated + rope.head_dim) ** -0.5 * _logit_factor(config, rope),
        interleaved=read_flag(config, "rope_interleave", default=True),
        bias=bias,
    )


def _logit_factor(config: Mapping[str, Any], rope: RopeConfig) -> float:
    """Return what yarn multiplies the attention logits with: the square of its temperature with the weight
    ``mscale_all_dim``."""
    section = config.get("rope_parameters") or config.get("rope_scaling") or {}
    weight = section.get("mscale_all_dim")
    if rope.kind is not RopeKind.YARN or not weight or rope.factor <= 1:
        return 1.0
    return (0.1 * float(weight) * math.log(rope.factor) + 1.0) ** 2
