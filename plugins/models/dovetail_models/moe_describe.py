"""Describe models with experts from config.json alone: what the families share, and Mixtral, Qwen2-MoE, Qwen3-MoE and
OLMoE. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from dovetail.errors import ConfigError
from dovetail.interfaces.expert_shapes import ExpertsShape, RoutingRule
from dovetail.interfaces.features import Feature
from dovetail.interfaces.model import ModelInfo
from dovetail.layers.rope import RopeConfig, read_rope
from dovetail_models.dense_describe import DenseConfig, layered_windows, uniform_windows
from dovetail_models.describe import OFFERS, HeadSizes, Windows, cut_windows, make_info, read_heads, refuse_activation
from dovetail_models.settings import read_flag, read_float, read_int, read_predict_layers, refuse_unread

COUNTS = frozenset({"num_experts", "num_local_experts"})
"""Hold the two names of the number of experts: transformers 5 writes the second for some families whose published
checkpoints have the first."""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Hold the names that a checkpoint gives to the parts of a layer of experts. ``layer`` is the name of the feed-forward
    layer within its decoder layer, with experts or without; the other names are within it. ``projections`` are gate, up and down of each expert."""

    layer: str = "mlp"
    router: str = "gate"
    correction: str = "gate.e_score_correction_bias"
    experts: str = "experts"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig(DenseConfig):
    """Hold what ``MoeModel`` needs in addition to ``ModelInfo``. ``sparse`` says of each layer whether it has experts;
    the others have an MLP of ``intermediate_size``. ``qk_norm_across_heads``: all queries of a token are
    normalised together, and all its keys. ``rotates_pairs``: the elements (0, 1), (2, 3) and so on of a head are rotated. ``sinks``: heads have
    attention sinks."""

    experts: ExpertsShape
    sparse: tuple[bool, ...]
    names: ExpertNames = ExpertNames()
    qk_norm_across_heads: bool = False
    rotates_pairs: bool = False
    sinks: bool = False


def read_moe_rope(
    config: Mapping[str, Any], sizes: HeadSizes, theta: float, max_positions: int, partial: float | None = None
) -> RopeConfig:
    """Return the rotary settings; ``theta`` and ``max_positions`` are the defaults of absent keys. For ``partial`` see
    ``read_rope``. Raises ``ConfigError``."""
    with_theta = dict(config) if config.get("rope_theta") else {**config, "rope_theta": theta}
    return read_rope(with_theta, sizes.head_dim, read_int(config, "max_position_embeddings", max_positions), partial)


def moe_config(
    config: Mapping[str, Any],
    experts: ExpertsShape,
    rope: RopeConfig,
    *,
    sparse: Sequence[bool] | None = None,
    windows: Windows | None = None,
    eps: float = 1e-6,
    tied: bool = False,
) -> MoeConfig:
    """Return what all families read in the same way: the config of a model whose layers all have experts and full
    attention, unless ``sparse`` or ``windows`` are given. ``eps`` and ``tied`` are the defaults of absent keys. A family
    replaces the other fields. Raises ``ConfigError``."""
    layers = read_int(config, "num_hidden_layers")
    with_experts = (True,) * layers if sparse is None else tuple(sparse)
    return MoeConfig(
        intermediate_size=experts.size if all(with_experts) else read_int(config, "intermediate_size"),
        norm_eps=read_float(config, "rms_norm_eps", eps),
        rope=rope,
        windows=cut_windows(windows or (None,) * layers, rope.context_len),
        tied=read_flag(config, "tie_word_embeddings") if "tie_word_embeddings" in config else tied,
        predict_layers=read_predict_layers(config),
        experts=experts,
        sparse=with_experts,
    )


Extended = TypeVar("Extended", bound=MoeConfig)


def extended(kind: type[Extended], common: MoeConfig, **more: Any) -> Extended:
    """Return ``common`` with further fields, as an object of its subclass ``kind``."""
    return kind(**{field.name: getattr(common, field.name) for field in fields(common)}, **more)


def moe_info(
    config: Mapping[str, Any],
    architecture: str,
    sizes: HeadSizes,
    context_len: int,
    own: MoeConfig,
    needs: frozenset[Feature] = frozenset(),
    *,
    predicts: bool = False,
) -> ModelInfo:
    """Return the ``ModelInfo`` of a model with experts. ``predicts`` means that drafters implement the layers that predict
    further tokens, if there are any. Raises ``ConfigError``."""
    needs = needs | own.experts.needs if any(own.sparse) else needs
    # products in float32, and norms over whole projections, add in an order that depends on the number of tokens
    varies = own.experts.routing.float32 or own.qk_norm_across_heads
    offers = OFFERS - {Feature.MODEL_BATCH_INVARIANT} if varies else OFFERS
    offers |= {Feature.MODEL_DATA_ATTENTION}
    info = make_info(config, architecture, sizes, context_len, own, needs=needs, offers=offers)
    offers = info.offers if predicts else info.offers - {Feature.MODEL_MTP_HEAD}
    split: list[tuple[str, int]] = []
    if not all(own.sparse):
        split.append(("intermediate_size", own.intermediate_size))
    if own.experts.shared_size:
        split.append(("the size of the shared expert", own.experts.shared_size))
    of_experts = ("the number of experts", own.experts.routing.num_experts), ("the size of an expert", own.experts.size)
    return replace(info, offers=offers, split_sizes=tuple(split), expert_sizes=of_experts if any(own.sparse) else None)


def read_expert_count(config: Mapping[str, Any], default: int) -> int:
    """Return the number of experts, by either of its names. Raises ``ConfigError``."""
    key = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    return read_int(config, key, default)


def sparse_by_step(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return which layers of a Qwen model have experts, by ``decoder_sparse_step`` and ``mlp_only_layers``. Raises
    ``ConfigError``."""
    layers, step = read_int(config, "num_hidden_layers"), read_int(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(index, int) for index in dense):
        raise ConfigError(f"config.json: mlp_only_layers is {dense!r}; allowed: a list of indices of layers")
    return tuple(index not in dense and (index + 1) % step == 0 for index in range(layers))


MIXTRAL_NAMES = ExpertNames(layer="block_sparse_moe", projections=("w1", "w3", "w2"))
"""Hold the names in checkpoints of Mixtral and its relatives."""

QWEN_NAMES = ExpertNames(shared="shared_expert")
"""Hold the names in checkpoints of Qwen with a shared expert."""

_BY_STEP = frozenset({"decoder_sparse_step", "mlp_only_layers", "norm_topk_prob"})


def describe_mixtral(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of Mixtral. Raises ``ConfigError``."""
    architecture = "MixtralForCausalLM"
    refuse_unread(config, COUNTS | {"sliding_window"}, architecture)
    refuse_activation(config)
    sizes = read_heads(config, default_kv_heads=8)
    rope = read_moe_rope(config, sizes, 1e6, 131072)
    rule = RoutingRule(read_expert_count(config, 8), read_int(config, "num_experts_per_tok", 2), renormalize=True)
    experts = ExpertsShape(read_int(config, "hidden_size"), read_int(config, "intermediate_size"), rule)
    windows = uniform_windows(config, read_int(config, "num_hidden_layers"), None)
    own = moe_config(config, experts, rope, windows=windows, eps=1e-5)
    return moe_info(config, architecture, sizes, rope.context_len, replace(own, names=MIXTRAL_NAMES))


def describe_qwen3_moe(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of Qwen3 with experts. Raises ``ConfigError``."""
    architecture = "Qwen3MoeForCausalLM"
    read = COUNTS | _BY_STEP | {"sliding_window", "use_sliding_window", "attention_bias"}
    refuse_unread(config, read, architecture)
    refuse_activation(config)
    sizes = read_heads(config, default_kv_heads=4)
    rope = read_moe_rope(config, sizes, 1e4, 32768)
    experts = ExpertsShape(
        read_int(config, "hidden_size"), read_int(config, "moe_intermediate_size", 768), qwen_rule(config, 128, 8)
    )
    layers = read_int(config, "num_hidden_layers")
    windows = uniform_windows(config, layers) if read_flag(config, "use_sliding_window") else None
    bias = read_flag(config, "attention_bias")
    own = moe_config(config, experts, rope, sparse=sparse_by_step(config), windows=windows)
    own = replace(own, qkv_bias=bias, out_bias=bias, qk_norm=True)
    return moe_info(config, architecture, sizes, rope.context_len, own)


def describe_qwen2_moe(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of Qwen1.5-MoE or Qwen2-MoE. Raises ``ConfigError``."""
    architecture = "Qwen2MoeForCausalLM"
    read = COUNTS | _BY_STEP | {"sliding_window", "use_sliding_window", "layer_types", "qkv_bias"}
    read |= {"shared_expert_intermediate_size"}
    refuse_unread(config, read, architecture)
    refuse_activation(config)
    sizes = read_heads(config, default_kv_heads=16)
    rope = read_moe_rope(config, sizes, 1e4, 32768)
    experts = ExpertsShape(
        read_int(config, "hidden_size"),
        read_int(config, "moe_intermediate_size", 1408),
        qwen_rule(config, 60, 4),
        shared_size=read_int(config, "shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )
    bias = config.get("qkv_bias") is None or read_flag(config, "qkv_bias")
    windows = layered_windows(config, read_int(config, "num_hidden_layers"))
    own = moe_config(config, experts, rope, sparse=sparse_by_step(config), windows=windows)
    own = replace(own, qkv_bias=bias, names=QWEN_NAMES)
    return moe_info(config, architecture, sizes, rope.context_len, own)


def describe_olmoe(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of OLMoE. Raises ``ConfigError``."""
    architecture = "OlmoeForCausalLM"
    refuse_unread(config, COUNTS | {"norm_topk_prob", "attention_bias"}, architecture)
    refuse_activation(config)
    sizes = read_heads(config)
    rope = read_moe_rope(config, sizes, 1e4, 4096)
    experts = ExpertsShape(
        read_int(config, "hidden_size"), read_int(config, "intermediate_size"), qwen_rule(config, 64, 8)
    )
    bias = read_flag(config, "attention_bias")
    own = moe_config(config, experts, rope, eps=1e-5)
    own = replace(own, qkv_bias=bias, out_bias=bias, qk_norm=True, qk_norm_across_heads=True)
    return moe_info(config, architecture, sizes, rope.context_len, own)


def qwen_rule(config: Mapping[str, Any], experts: int, top_k: int) -> RoutingRule:
    """Return the rule of Qwen and OLMoE; the numbers are the defaults of absent keys."""
    return RoutingRule(
        read_expert_count(config, experts),
        read_int(config, "num_experts_per_tok", top_k),
        renormalize=read_flag(config, "norm_topk_prob"),
    )
