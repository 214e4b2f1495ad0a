"""What a DFlash checkpoint is, from its config.json: the layout that https://github.com/z-lab/dflash publishes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dovetail.errors import ConfigError
from dovetail.interfaces.cache import CacheGroup
from dovetail.interfaces.model import ModelInfo
from dovetail.layers.attention import AttentionShape
from dovetail.layers.decoder import DecoderShape
from dovetail.layers.rope import RopeConfig, read_rope

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "architectures": (["DFlashDraftModel"],),
    "attention_sink_bias": (False,),
    "causal": (False,),
    "hidden_act": ("silu",),
    "input_embedding_scale": (1,),
    "is_causal": (False,),
    "quantization_config": (),
    "target_hidden_size": (),
    "use_swa": (False,),
}
"""Settings seen in published checkpoints, with the values (besides null) that are implemented."""


@dataclass(frozen=True, slots=True)
class DFlashShape:
    """``layer_ids`` are layers of the target, counted from 0: their outputs are the context. A block is the last token of the
    text and ``block_size - 1`` times ``mask_token_id``. ``rope.context_len`` is the longest context."""

    decoder: DecoderShape
    rope: RopeConfig
    num_layers: int
    layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int


def describe_dflash(config: Mapping[str, Any], target: ModelInfo, max_context: int) -> ModelInfo:
    """The facts of a checkpoint for a ``target``; their ``config`` is a ``DFlashShape``. Raises ``ConfigError``."""
    given = {**config, **_section(config)}
    _refuse_unread(given)
    shape = _shape(given, max_context)
    attention = shape.decoder.attention
    if attention.hidden_size != target.hidden_size:
        raise ConfigError(
            f"config.json of the drafter: hidden_size is {attention.hidden_size}, that of the target {target.hidden_size}; a DFlash drafter "
            "has the embeddings of its target: take the one that was trained for it"
        )
    if shape.mask_token_id >= target.vocab_size:
        raise ConfigError(
            f"config.json of the drafter: mask_token_id is {shape.mask_token_id}; the target embeds tokens below {target.vocab_size}"
        )
    return ModelInfo(
        architecture="DFlashDraftModel",
        vocab_size=target.vocab_size,
        hidden_size=attention.hidden_size,
        num_layers=shape.num_layers,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        context_len=max_context,
        cache_groups=(CacheGroup(shape.num_layers, attention.num_kv_heads, attention.head_dim),),
        config=shape,
    )


def _section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    section = config.get("dflash_config")
    if not isinstance(section, Mapping):
        raise ConfigError(
            f"config.json of the drafter: dflash_config is {section!r}; needed: a mapping with target_layer_ids and "
            "mask_token_id, as DFlash checkpoints have it"
        )
    return section


def _refuse_unread(given: Mapping[str, Any]) -> None:
    for key, neutral in NEUTRAL.items():
        value = given.get(key)
        if value is not None and value not in neutral:
            allowed = ", ".join(["null or absent", *map(repr, neutral)])
            raise ConfigError(f"config.json of the drafter: {key} is {value!r}; implemented: {allowed}")
    kinds = given.get("layer_types") or []
    if set(kinds) - {"full_attention"}:
        raise ConfigError(
            f"config.json of the drafter: layer_types has {sorted(set(kinds))}; implemented: full_attention, causal layers that slide are missing"
        )


def _shape(given: Mapping[str, Any], max_context: int) -> DFlashShape:
    hidden, heads = _integer(given, "hidden_size"), _integer(given, "num_attention_heads")
    head_dim = _integer(given, "head_dim", hidden // heads)
    norm_eps, bias = float(given.get("rms_norm_eps") or 1e-6), bool(given.get("attention_bias"))
    kv_heads = _integer(given, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"config.json of the drafter: num_attention_heads is {heads}, num_key_value_heads {kv_heads}; the first must be a "
            "multiple of the second"
        )
    rope = read_rope(given, head_dim, _integer(given, "max_position_embeddings", 32768))
    attention = AttentionShape(hidden, heads, kv_heads, head_dim, bias, bias, norm_eps)
    block_size = _integer(given, "block_size", 16)
    if block_size < 2:
        raise ConfigError(f"config.json of the drafter: block_size is {block_size}; needed: at least 2")
    return DFlashShape(
        DecoderShape(attention, _integer(given, "intermediate_size"), norm_eps),
        replace(rope, context_len=max_context),
        _integer(given, "num_hidden_layers"),
        _layer_ids(given),
        _integer(given, "mask_token_id", minimum=0),
        block_size,
    )


def _layer_ids(given: Mapping[str, Any]) -> tuple[int, ...]:
    ids = given.get("target_layer_ids")
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and i >= 0 for i in ids):
        raise ConfigError(
            f"config.json of the drafter: dflash_config.target_layer_ids is {ids!r}; needed: layers of the target, counted from 0"
        )
    return tuple(ids)


def _integer(given: Mapping[str, Any], key: str, default: int | None = None, minimum: int = 1) -> int:
    value = given.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigError(f"config.json of the drafter: {key} is {value!r}; needed: an integer of at least {minimum}")
    return value
