"""Describe Nemotron-H from config.json alone. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dovetail.errors import ConfigError
from dovetail.interfaces.cache import CacheGroup
from dovetail.interfaces.expert_shapes import ExpertsShape, RoutingRule
from dovetail.interfaces.mixer_shapes import SSD_NEEDS
from dovetail.interfaces.model import ModelInfo
from dovetail_models.dense_describe import DenseConfig
from dovetail_models.describe import make_info, read_heads
from dovetail_models.layer_norm_describe import read_activation
from dovetail_models.mamba2_describe import STATE_OFFERS, Mamba2Sizes, check_groups
from dovetail_models.settings import read_flag, read_float, read_int, refuse_other, refuse_unread

ARCHITECTURE = "NemotronHForCausalLM"
_KINDS = {"mamba": "mamba", "linear_attention": "mamba", "attention": "attention", "full_attention": "attention"}
_KINDS |= {"mlp": "mlp", "moe": "moe"}
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_OF_EXPERTS = frozenset({"n_routed_experts", "n_shared_experts", "n_group", "topk_group", "norm_topk_prob"})


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronHSizes(DenseConfig):
    """Hold what ``NemotronHModel`` needs in addition to ``DenseConfig``. ``kinds`` says of each layer whether it is
    ``mamba``, ``attention``, ``mlp`` or ``moe``. ``experts`` are those of layers of kind ``moe``, or None. If their
    ``hidden_size`` is not that of the model, projections around them lead to that size and back. ``shared_size`` is the
    intermediate size of the MLP beside them. With ``further``, the checkpoint has layers that predict further tokens, which
    nothing reads."""

    mixer: Mamba2Sizes
    kinds: tuple[str, ...]
    activation: str
    experts: ExpertsShape | None = None
    shared_size: int = 0
    further: bool = False


def describe_nemotron_h(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of Nemotron-H or Nemotron 3. Raises ``ConfigError``."""
    kinds = _read_kinds(config)
    more = {"use_bias", "mlp_bias", "routed_scaling_factor", "num_local_experts", "layer_types"}
    refuse_unread(config, {*more, *_OF_EXPERTS}, ARCHITECTURE)
    neutral = {"mamba_hidden_act": "silu", "tie_word_embeddings": False}
    refuse_other(config, neutral, ARCHITECTURE)
    config = {**config, "num_hidden_layers": len(kinds)}
    sizes = read_heads(config, default_kv_heads=8, default_head_dim=128)
    heads, groups = read_int(config, "mamba_num_heads", 128), read_int(config, "n_groups", 8)
    check_groups(heads, groups, "n_groups")
    bias = read_flag(config, "use_bias")
    mixer = Mamba2Sizes(
        num_heads=heads,
        head_dim=read_int(config, "mamba_head_dim", 64),
        num_groups=groups,
        state_size=read_int(config, "ssm_state_size", 128),
        conv_width=read_int(config, "conv_kernel", 4, minimum=2),
        conv_bias=read_flag(config, "use_conv_bias", default=True),
        in_bias=bias,
        out_bias=bias,
        limits=(read_float(config, "time_step_min", 0.001), float("inf")),
    )
    own = NemotronHSizes(
        intermediate_size=read_int(config, "intermediate_size", 21504),
        norm_eps=read_float(config, "layer_norm_epsilon", 1e-5),
        rope=None,
        windows=(None,) * len(kinds),
        mlp_bias=read_flag(config, "mlp_bias"),
        mixer=mixer,
        kinds=kinds,
        activation=read_activation(config, "mlp_hidden_act", "relu2"),
        further=read_int(config, "num_nextn_predict_layers", 0, minimum=0) > 0,
    )
    if "moe" in kinds:
        shared = read_int(config, "moe_shared_expert_intermediate_size", 7688)
        own = replace(own, experts=_read_experts(config), shared_size=shared)
    info = make_info(config, ARCHITECTURE, sizes, read_int(config, "max_position_embeddings", 4096), own)
    info = _with_experts(info, own)
    attends, mixes = kinds.count("attention"), kinds.count("mamba")
    groups_of_pages = (replace(info.cache_groups[0], num_layers=attends),) if attends else ()
    return replace(
        info,
        cache_groups=(*groups_of_pages, *([CacheGroup.of_states(mixes, mixer.states)] if mixes else [])),
        split_sizes=(*info.split_sizes, mixer.split),
        needs=info.needs | (SSD_NEEDS if mixes else frozenset()),
        offers=info.offers & STATE_OFFERS,
    )


def _read_kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kinds of layers, by a list of names or the older pattern of letters. Raises ``ConfigError``."""
    key = "layers_block_type" if config.get("layers_block_type") else "hybrid_override_pattern"
    given, known = config.get(key), _KINDS if key == "layers_block_type" else _LETTERS
    if not isinstance(given, list | str) or not given or not set(map(str, given)) <= set(known):
        raise ConfigError(f"config.json: {key} is {given!r}; needed: one of {', '.join(known)} for each layer")
    return tuple(known[name] for name in given)


def _read_experts(config: Mapping[str, Any]) -> ExpertsShape:
    """Return the experts of layers that have them. Raises ``ConfigError``."""
    refuse_other(config, {"mlp_hidden_act": "relu2", "n_shared_experts": 1}, f"{ARCHITECTURE} with experts")
    latent = config.get("moe_latent_size")
    if latent is not None and read_flag(config, "mlp_bias"):
        raise ConfigError("config.json: mlp_bias is True and moe_latent_size is set; allowed: one of them")
    count = "n_routed_experts" if config.get("n_routed_experts") is not None else "num_local_experts"
    rule = RoutingRule(
        read_int(config, count, 8),
        read_int(config, "num_experts_per_tok", 2),
        scoring="sigmoid",
        renormalize=read_flag(config, "norm_topk_prob", default=True),
        scale=read_float(config, "routed_scaling_factor", 1.0),
        corrected=True,
        groups=read_int(config, "n_group", 1),
        groups_kept=read_int(config, "topk_group", 1),
        float32=True,
    )
    hidden = read_int(config, "hidden_size" if latent is None else "moe_latent_size")
    return ExpertsShape(hidden, read_int(config, "moe_intermediate_size", 7688), rule, ungated=True)


def _with_experts(info: ModelInfo, own: NemotronHSizes) -> ModelInfo:
    """Return ``info`` with what ranks divide: the intermediate values of MLPs, those of experts or the experts."""
    split = info.split_sizes if "mlp" in own.kinds else ()
    if own.experts is None:
        return replace(info, split_sizes=split)
    numbers = (
        ("the number of experts", own.experts.routing.num_experts),
        ("the size of an expert", own.experts.size),
    )
    return replace(
        info,
        needs=info.needs | own.experts.needs,
        expert_sizes=numbers,
        split_sizes=(*split, ("the size of the shared expert", own.shared_size)),
    )
