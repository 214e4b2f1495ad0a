"""Read the config.json of a DFlash checkpoint, in the layout of https://github.com/z-lab/dflash or of the speculators
library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dovetail.errors import ConfigError
from dovetail.interfaces.cache import CacheGroup
from dovetail.interfaces.features import Feature
from dovetail.interfaces.model import ModelInfo
from dovetail.layers.attention import AttentionShape
from dovetail.layers.decoder import DecoderShape
from dovetail.layers.rope import RopeConfig, read_rope
from dovetail_speculative.checkpoints import check_heads
from dovetail_speculative.speculators import flattened

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "architectures": (["DFlashDraftModel"], ["DFlashSpeculator"]),
    "attention_sink_bias": (False,),
    "hidden_act": ("silu",),
    "input_embedding_scale": (1,),
    "projector_type": ("dflash",),
    "sample_from_anchor": (False,),
    "shift_label": (False,),
    "target_hidden_size": (),
    "use_swa": (False,),
}
"""Settings of published checkpoints, with the values (besides null) that are implemented."""


@dataclass(frozen=True, slots=True)
class DFlashShape:
    """Describe a DFlash drafter.

    ``layer_ids`` are layers of the target, counted from 0, whose outputs are the context. A block is the last token of
    the text and ``block_size - 1`` times ``mask_token_id``. With ``causal``, a token of a block does not see the tokens
    after it. ``windows`` has the window of each layer. ``rope.context_len`` is the longest context. If ``draft_vocab`` is
    set, the drafter has its own head over that number of tokens. With ``own_embedding`` it has its own embedding.
    """

    decoder: DecoderShape
    rope: RopeConfig
    windows: tuple[int | None, ...]
    causal: bool
    layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int
    draft_vocab: int | None = None
    own_embedding: bool = False


def describe_dflash(
    config: Mapping[str, Any], target: ModelInfo, max_context: int, names: frozenset[str] = frozenset()
) -> ModelInfo:
    """Return the facts of a checkpoint for ``target``; their ``config`` is a ``DFlashShape``.

    ``names`` are the tensors of the checkpoint; there are none for random weights. Raises ``ConfigError`` if something
    is not implemented or does not fit the target.
    """
    config = flattened(config, "dflash")
    given = {**config, **_section(config)}
    _refuse_unread(given)
    shape = replace(
        _shape(given, max_context),
        draft_vocab=_draft_vocab(given, target.vocab_size, names),
        own_embedding="embed_tokens.weight" in names,
    )
    attention = shape.decoder.attention
    assert isinstance(attention, AttentionShape)
    if attention.hidden_size != target.hidden_size:
        raise ConfigError(
            f"config.json of the drafter: hidden_size is {attention.hidden_size}; the target's is {target.hidden_size}. A DFlash drafter "
            "uses the embeddings of its target; use the drafter that was trained for this target"
        )
    if shape.mask_token_id >= target.vocab_size:
        raise ConfigError(
            f"config.json of the drafter: mask_token_id is {shape.mask_token_id}; the target embeds tokens below {target.vocab_size}"
        )
    return ModelInfo(
        architecture="DFlashDraftModel",
        vocab_size=target.vocab_size,
        hidden_size=attention.hidden_size,
        num_layers=len(shape.windows),
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        context_len=max_context,
        cache_groups=(CacheGroup(len(shape.windows), attention.num_kv_heads, attention.head_dim),),
        offers=frozenset({Feature.MODEL_TENSOR_PARALLEL}),
        split_sizes=(("intermediate_size", shape.decoder.intermediate_size),),
        needs=frozenset({Feature.ATTN_SLIDING_WINDOW}) if any(shape.windows) else frozenset(),
        quantization=_quantization(config),
        config=shape,
    )


def _section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    if "speculators_model_type" in config:  # this layout numbers layers by what enters them
        ids = config.get("aux_hidden_state_layer_ids")
        return {"target_layer_ids": [i - 1 for i in ids] if isinstance(ids, list) else ids}
    section = config.get("dflash_config")
    if not isinstance(section, Mapping):
        raise ConfigError(
            f"config.json of the drafter: dflash_config is {section!r}; needed: a mapping with target_layer_ids and "
            "mask_token_id, as DFlash checkpoints have it"
        )
    return section


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found = config.get("quantization_config")
    if found is not None and not isinstance(found, Mapping):
        raise ConfigError(f"config.json of the drafter: quantization_config is {found!r:.80}; allowed: an object, null")
    return found


def _refuse_unread(given: Mapping[str, Any]) -> None:
    for key, neutral in NEUTRAL.items():
        value = given.get(key)
        if value is not None and value not in neutral:
            allowed = ", ".join(["null or absent", *map(repr, neutral)])
            raise ConfigError(f"config.json of the drafter: {key} is {value!r}; implemented: {allowed}")


def _windows(given: Mapping[str, Any], count: int, block_size: int) -> tuple[int | None, ...]:
    kinds = given.get("layer_types") or ["full_attention"] * count
    if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ConfigError(
            f"config.json of the drafter: layer_types is {kinds!r}; needed: a list of {count}, each full_attention or sliding_attention"
        )
    if "sliding_attention" not in kinds:
        return (None,) * count
    window = _integer(given, "sliding_window", minimum=block_size)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _causal(given: Mapping[str, Any], windows: tuple[int | None, ...]) -> bool:
    """Return whether blocks are causal. By default they are causal in layers with a sliding window, and in no other
    layers."""
    for key in ("causal", "is_causal"):
        if given.get(key) is not None:
            return bool(given[key])
    sliding = {window is not None for window in windows} if not given.get("sliding_window_non_causal") else {False}
    if len(sliding) > 1:
        raise ConfigError(
            f"config.json of the drafter: layer_types is {given['layer_types']}. By default, blocks are causal only in layers with a sliding "
            "window, and a mixture is not implemented; set causal (or is_causal) for all layers"
        )
    return True in sliding


def _draft_vocab(given: Mapping[str, Any], vocab_size: int, names: frozenset[str]) -> int | None:
    count = _integer(given, "draft_vocab_size", vocab_size)
    if count > vocab_size:
        raise ConfigError(
            f"config.json of the drafter: draft_vocab_size is {count}; the target has {vocab_size} tokens"
        )
    return count if count < vocab_size or "lm_head.weight" in names else None


def _shape(given: Mapping[str, Any], max_context: int) -> DFlashShape:
    hidden, heads = _integer(given, "hidden_size"), _integer(given, "num_attention_heads")
    head_dim = _integer(given, "head_dim", hidden // heads)
    norm_eps, bias = float(given.get("rms_norm_eps") or 1e-6), bool(given.get("attention_bias"))
    kv_heads = _integer(given, "num_key_value_heads", heads)
    check_heads(heads, kv_heads)
    rope = read_rope(given, head_dim, _integer(given, "max_position_embeddings", 32768))
    attention = AttentionShape(hidden, heads, kv_heads, head_dim, bias, bias, norm_eps)
    block_size = _integer(given, "block_size", 16)
    if block_size < 2:
        raise ConfigError(f"config.json of the drafter: block_size is {block_size}; needed: at least 2")
    windows = _windows(given, _integer(given, "num_hidden_layers"), block_size)
    return DFlashShape(
        DecoderShape(attention, _integer(given, "intermediate_size"), norm_eps),
        replace(rope, context_len=max_context),
        windows,
        _causal(given, windows),
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
