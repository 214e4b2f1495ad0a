"""Describe Granite with experts from config.json alone. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dovetail.interfaces.expert_shapes import ExpertsShape, RoutingRule
from dovetail.interfaces.model import ModelInfo
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

GRANITE_FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
GRANITE_MOE_NAMES = ExpertNames(layer="block_sparse_moe", router="router.layer")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteMoeSizes(MoeConfig):
    """Hold what ``GraniteMoeModel`` needs in addition to ``MoeConfig``: the multipliers of ``GraniteSizes``."""

    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float


def describe_granite_moe(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of Granite 3 with experts. Raises ``ConfigError``."""
    return _describe(config, "GraniteMoeForCausalLM", 0)


def describe_granite_moe_shared(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of Granite with experts and a shared expert. Raises ``ConfigError``."""
    return _describe(config, "GraniteMoeSharedForCausalLM", read_int(config, "shared_intermediate_size", 0, minimum=0))


def _describe(config: dict[str, Any], architecture: str, shared: int) -> ModelInfo:
    reads = COUNTS | {"attention_bias", *GRANITE_FACTORS} | ({"shared_intermediate_size"} if shared else set())
    refuse_unread(config, reads, architecture)
    refuse_activation(config)
    sizes = read_heads(config)
    rope = read_moe_rope(config, sizes, 1e4, 2048)
    experts = ExpertsShape(
        read_int(config, "hidden_size"),
        read_int(config, "intermediate_size"),
        RoutingRule(read_expert_count(config, 8), read_int(config, "num_experts_per_tok", 2), after_choice=True),
        shared_size=shared,
    )
    bias = read_flag(config, "attention_bias")
    common = replace(moe_config(config, experts, rope), qkv_bias=bias, out_bias=bias, names=GRANITE_MOE_NAMES)
    own = extended(GraniteMoeSizes, common, **{name: read_float(config, name, 1.0) for name in GRANITE_FACTORS})
    return moe_info(config, architecture, sizes, rope.context_len, own)
