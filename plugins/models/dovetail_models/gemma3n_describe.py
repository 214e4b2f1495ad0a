"""Describe the text model of Gemma 3n from config.json alone. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dovetail.errors import ConfigError
from dovetail.interfaces.features import Feature
from dovetail.interfaces.model import ModelInfo
from dovetail_models.describe import (
    OFFERS,
    DecoderConfig,
    LayerPlace,
    cache_groups,
    cut_windows,
    group_layers,
    layer_pattern,
    make_info,
    read_heads,
    read_layer_types,
    read_ropes_by_type,
)
from dovetail_models.settings import read_flag, read_float, read_int, refuse_other, refuse_unread

ARCHITECTURE = "Gemma3nForCausalLM"
GEMMA3N: Mapping[str, Any] = {
    "vocab_size": 262400,
    "vocab_size_per_layer_input": 262144,
    "hidden_size": 2048,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "altup_active_idx": 0,
    "altup_num_inputs": 4,
    "num_kv_shared_layers": 15,
    "laurel_rank": 64,
}
"""Hold the defaults of absent keys, as in transformers."""
_READS = frozenset({"attention_bias", "final_logit_softcapping", "layer_types", "sliding_window"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3nSizes(DecoderConfig):
    """Hold what ``Gemma3nModel`` needs in addition to ``ModelInfo``.

    The residual stream has ``streams`` vectors for each token, of which every layer computes number ``active``
    (AltUp). ``places`` says where each layer finds keys and values; the last ``shared`` layers read those of an earlier
    layer and write none. ``sparsity`` is the share of gates of each layer that are set to 0. ``multimodal`` is True if the
    tensors are part of a checkpoint that also has models for images and sound.
    """

    streams: int
    active: int
    shared: int
    places: tuple[LayerPlace, ...]
    intermediate_sizes: tuple[int, ...]
    sparsity: tuple[float, ...]
    laurel_rank: int
    layer_vocab: int
    layer_width: int
    logit_cap: float | None
    attention_bias: bool
    multimodal: bool


def describe_gemma3n(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of the text model of Gemma 3n, alone or within a checkpoint for images and sound. Raises
    ``ConfigError``."""
    text = config.get("text_config")
    if text is None:
        return _describe({**GEMMA3N, **config}, multimodal=False)
    if not isinstance(text, Mapping):
        raise ConfigError(f"config.json: text_config is {text!r}; needed: the settings of the text model")
    keys = ("dtype", "torch_dtype", "eos_token_id", "quantization_config")
    return _describe({**GEMMA3N, **text, **{key: config[key] for key in keys if key in config}}, multimodal=True)


def _describe(given: dict[str, Any], *, multimodal: bool) -> ModelInfo:
    refuse_unread(given, _READS, ARCHITECTURE)
    neutral = {"hidden_activation": "gelu_pytorch_tanh", "altup_correct_scale": True}
    refuse_other(given, neutral, ARCHITECTURE)
    sizes, positions = read_heads(given), read_int(given, "max_position_embeddings")
    layers, widths = read_int(given, "num_hidden_layers"), _read_widths(given)
    types = layer_pattern(given, layers, every=5)
    known = {"full_attention": None, "sliding_attention": read_int(given, "sliding_window")}
    windows = cut_windows(read_layer_types({**given, "layer_types": types}, layers, known), positions)
    local = given.get("rope_local_base_freq") or 10000.0
    ropes = read_ropes_by_type(given, sizes.head_dim, positions, theta=1e6, sliding_theta=local)
    shared = read_int(given, "num_kv_shared_layers", minimum=0)
    streams, active = read_int(given, "altup_num_inputs"), read_int(given, "altup_active_idx", minimum=0)
    if active >= streams:
        raise ConfigError(
            f"config.json: altup_active_idx is {active}; allowed: 0 to altup_num_inputs - 1 = {streams - 1}"
        )
    own = Gemma3nSizes(
        intermediate_size=max(widths),
        norm_eps=read_float(given, "rms_norm_eps", 1e-6),
        rope=None,
        windows=windows,
        layer_ropes=tuple(replace(ropes[kind], context_len=positions) for kind in types),
        tied=read_flag(given, "tie_word_embeddings"),
        streams=streams,
        active=active,
        shared=shared,
        places=_places(windows, types, shared),
        intermediate_sizes=widths,
        sparsity=_read_sparsity(given, layers),
        laurel_rank=read_int(given, "laurel_rank"),
        layer_vocab=read_int(given, "vocab_size_per_layer_input"),
        layer_width=read_int(given, "hidden_size_per_layer_input"),
        logit_cap=None
        if given["final_logit_softcapping"] is None
        else read_float(given, "final_logit_softcapping", 1.0),
        attention_bias=read_flag(given, "attention_bias"),
        multimodal=multimodal,
    )
    offers = OFFERS - {Feature.MODEL_HIDDEN_STATES, Feature.MODEL_BATCH_INVARIANT}
    info = make_info(given, ARCHITECTURE, sizes, positions, own, offers=offers)
    return replace(
        info,
        cache_groups=cache_groups(windows[: layers - shared], sizes),
        split_sizes=tuple(("intermediate_size", size) for size in dict.fromkeys(widths)),
    )


def _places(windows: tuple[int | None, ...], types: list[Any], shared: int) -> tuple[LayerPlace, ...]:
    """Return where each layer finds keys and values: a layer that shares them, at the place of the last layer of its type
    that does not. Raises ``ConfigError``."""
    count = len(types) - shared
    missing = set(types[count:]) - set(types[: max(count, 0)])
    if count < 1 or missing:
        raise ConfigError(
            f"config.json: num_kv_shared_layers is {shared}, and there is no layer of type {', '.join(sorted(missing or set(types)))} "
            f"before them; allowed: 0 to {len(types) - 1}, with a layer of each type before"
        )
    own = group_layers(windows[:count])
    latest = dict(zip(types[:count], own, strict=True))
    return (*own, *(latest[kind] for kind in types[count:]))


def _read_widths(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the intermediate size of each layer. Raises ``ConfigError``."""
    given, layers = config["intermediate_size"], read_int(config, "num_hidden_layers")
    if not isinstance(given, list):
        return (read_int(config, "intermediate_size"),) * layers
    if len(given) != layers:
        raise ConfigError(
            f"config.json: intermediate_size has {len(given)} entries; needed: one for each of {layers} layers"
        )
    return tuple(read_int({"intermediate_size": size}, "intermediate_size") for size in given)


def _read_sparsity(config: Mapping[str, Any], layers: int) -> tuple[float, ...]:
    """Return the share of gates of each layer that are set to 0. Raises ``ConfigError``."""
    given = config.get("activation_sparsity_pattern")
    if given is None:
        sparse = 10 if layers > 10 else 0
        return (0.95,) * sparse + (0.0,) * (layers - sparse)
    fits = isinstance(given, list) and len(given) == layers
    if not fits or not all(isinstance(share, int | float) and 0 <= share < 1 for share in given):
        raise ConfigError(
            f"config.json: activation_sparsity_pattern is {str(given)[:80]}; needed: a number from 0 to below 1 for each of {layers} layers"
        )
    return tuple(float(share) for share in given)
