"""Describe Granite 4, whose layers attend or keep states, from config.json alone. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dovetail.interfaces.expert_shapes import ExpertsShape, RoutingRule
from dovetail.interfaces.model import ModelInfo
from dovetail_models.describe import read_heads, refuse_activation
from dovetail_models.granite_moe_describe import GRANITE_FACTORS, GRANITE_MOE_NAMES, GraniteMoeSizes
from dovetail_models.mamba2_describe import Mamba2Sizes, hybrid_info, read_mamba_sizes, read_state_layers
from dovetail_models.moe_describe import COUNTS, extended, moe_config, moe_info, read_moe_rope
from dovetail_models.settings import read_flag, read_float, read_int, refuse_unread

ARCHITECTURE = "GraniteMoeHybridForCausalLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteHybridSizes(GraniteMoeSizes):
    """Hold what ``GraniteHybridModel`` needs in addition to ``GraniteMoeSizes``. ``states`` says of each layer whether it
    keeps states; the others attend."""

    mixer: Mamba2Sizes
    states: tuple[bool, ...]


def describe_granite_hybrid(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of Granite 4. Raises ``ConfigError``."""
    more = {"attention_bias", "shared_intermediate_size", "layer_types", "position_embedding_type"}
    refuse_unread(config, COUNTS | {*more, *GRANITE_FACTORS}, ARCHITECTURE)
    refuse_activation(config)
    sizes, states = read_heads(config), read_state_layers(config)
    rope = read_moe_rope(config, sizes, 1e4, 2048)
    count, shared = (
        read_int(config, "num_local_experts", 8, minimum=0),
        read_int(config, "shared_intermediate_size", 1024),
    )
    experts = ExpertsShape(
        read_int(config, "hidden_size"),
        read_int(config, "intermediate_size") if count else shared,
        RoutingRule(count or 1, read_int(config, "num_experts_per_tok", 2) if count else 1, after_choice=True),
        shared_size=shared if count else 0,
    )
    bias = read_flag(config, "attention_bias")
    common = replace(
        moe_config(config, experts, rope, sparse=(count > 0,) * len(states)),
        intermediate_size=shared,
        qkv_bias=bias,
        out_bias=bias,
        names=GRANITE_MOE_NAMES,
        rope=rope if config.get("position_embedding_type") == "rope" else None,
    )
    factors = {name: read_float(config, name, 1.0) for name in GRANITE_FACTORS}
    mixer = read_mamba_sizes(config)
    own = extended(GraniteHybridSizes, common, **factors, mixer=mixer, states=states)
    return hybrid_info(moe_info(config, ARCHITECTURE, sizes, rope.context_len, own), states, mixer.split, mixer.states)
