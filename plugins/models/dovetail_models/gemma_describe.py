"""Describe Gemma, Gemma 2 and Gemma 3 from config.json alone. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dovetail.errors import ConfigError
from dovetail.interfaces.features import Feature
from dovetail.interfaces.model import ModelInfo
from dovetail.layers.rope import RopeConfig, read_rope
from dovetail_models.describe import (
    DecoderConfig,
    cut_windows,
    layer_pattern,
    make_info,
    read_heads,
    read_layer_types,
    read_ropes_by_type,
)
from dovetail_models.settings import read_flag, read_float, read_int, refuse_unread

_READS = frozenset(
    {
        "attention_bias",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "layer_types",
        "query_pre_attn_scalar",
        "sliding_window",
    }
)
_ACTIVATION = "gelu_pytorch_tanh"

GEMMA2: Mapping[str, Any] = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
"""Hold the defaults of absent keys, as in transformers. Published checkpoints leave out many keys."""
GEMMA: Mapping[str, Any] = {
    **GEMMA2,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "query_pre_attn_scalar": None,
    "sliding_window": None,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}
GEMMA3: Mapping[str, Any] = {
    **GEMMA2,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window_pattern": 6,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaDecoderConfig(DecoderConfig):
    """Hold what ``GemmaModel`` needs in addition to ``ModelInfo``. ``multimodal`` is True if the tensors are part of a
    checkpoint that also has a model for images. With ``sandwich``, there are norms after attention and MLP too."""

    scale: float
    attention_cap: float | None
    logit_cap: float | None
    attention_bias: bool = False
    qk_norm: bool = False
    multimodal: bool = False
    sandwich: bool = True


def describe_gemma(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of the first Gemma. Raises ``ConfigError``."""
    refuse_unread(config, {"attention_bias"}, "GemmaForCausalLM")
    given = {**GEMMA, **config}
    sizes, layers = read_heads(given), read_int(given, "num_hidden_layers")
    rope = read_rope(given, sizes.head_dim, read_int(given, "max_position_embeddings"))
    # the released settings say gelu and mean its approximation; transformers reads them so, too
    activation = _ACTIVATION if given.get("hidden_act") in (None, "gelu") else given["hidden_act"]
    fixed = {
        "hidden_activation": activation,
        "query_pre_attn_scalar": sizes.head_dim,
        "layer_types": ["full_attention"] * layers,
        "sliding_window": 1,
    }
    info = _info({**given, **fixed}, "GemmaForCausalLM", {"full_attention": rope, "sliding_attention": rope})
    return replace(info, config=replace(info.config, sandwich=False))


def describe_gemma2(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of Gemma 2. Raises ``ConfigError``."""
    given = {**GEMMA2, **config}
    sizes, positions = read_heads(given), read_int(given, "max_position_embeddings")
    rope = read_rope(given, sizes.head_dim, positions)
    return _info(given, "Gemma2ForCausalLM", {"full_attention": rope, "sliding_attention": rope})


def describe_gemma3(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of the text model of Gemma 3, alone or within a checkpoint for images. Raises
    ``ConfigError``."""
    text = config.get("text_config")
    if text is None:
        return _describe_gemma3({**GEMMA3, **config}, multimodal=False)
    if not isinstance(text, Mapping):
        raise ConfigError(f"config.json: text_config is {text!r}; needed: the settings of the text model")
    common = {
        key: config[key] for key in ("dtype", "torch_dtype", "eos_token_id", "quantization_config") if key in config
    }
    return _describe_gemma3({**GEMMA3, **text, **common}, multimodal=True)


def _describe_gemma3(given: dict[str, Any], *, multimodal: bool) -> ModelInfo:
    if given["attn_logit_softcapping"] is not None:
        raise ConfigError("config.json: attn_logit_softcapping is set; Gemma 3 has none. Needed: null")
    sizes, positions = read_heads(given), read_int(given, "max_position_embeddings")
    local = given.get("rope_local_base_freq") or 10000.0
    ropes = read_ropes_by_type(given, sizes.head_dim, positions, theta=1e6, sliding_theta=local)
    # the published numbers of positions include the stretching
    ropes = {kind: replace(rope, context_len=positions) for kind, rope in ropes.items()}
    return _info(given, "Gemma3ForCausalLM", ropes, qk_norm=True, multimodal=multimodal)


def _info(
    given: dict[str, Any],
    architecture: str,
    ropes: Mapping[str, RopeConfig],
    *,
    qk_norm: bool = False,
    multimodal: bool = False,
) -> ModelInfo:
    refuse_unread(given, _READS, architecture)
    activation = given.get("hidden_activation") or _ACTIVATION
    if activation != _ACTIVATION:
        raise ConfigError(f"config.json: hidden_activation is {activation!r}; implemented: {_ACTIVATION}")
    layers = read_int(given, "num_hidden_layers")
    given = {**given, "layer_types": layer_pattern(given, layers, every=read_int(given, "sliding_window_pattern"))}
    known = {"full_attention": None, "sliding_attention": read_int(given, "sliding_window")}
    windows = read_layer_types(given, layers, known)
    context = ropes["full_attention"].context_len
    cap = _cap(given, "attn_logit_softcapping")
    own = GemmaDecoderConfig(
        intermediate_size=read_int(given, "intermediate_size"),
        norm_eps=read_float(given, "rms_norm_eps", 1e-6),
        rope=ropes["full_attention"],
        windows=cut_windows(windows, context),
        layer_ropes=tuple(ropes[kind] for kind in given["layer_types"]) if len(set(ropes.values())) > 1 else (),
        tied=read_flag(given, "tie_word_embeddings"),
        scale=read_float(given, "query_pre_attn_scalar", 256.0) ** -0.5,
        attention_cap=cap,
        logit_cap=_cap(given, "final_logit_softcapping"),
        attention_bias=read_flag(given, "attention_bias"),
        qk_norm=qk_norm,
        multimodal=multimodal,
    )
    needs = frozenset({Feature.ATTN_SOFT_CAP}) if cap else frozenset()
    return make_info(given, architecture, read_heads(given), context, own, needs=needs)


def _cap(config: Mapping[str, Any], key: str) -> float | None:
    return None if config.get(key) is None else read_float(config, key, 1.0)
