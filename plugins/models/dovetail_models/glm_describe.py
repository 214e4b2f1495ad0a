"""Describe GLM-4 from config.json alone. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dovetail.interfaces.model import ModelInfo
from dovetail.layers.rope import read_rope
from dovetail_models.describe import DecoderConfig, make_info, read_heads, refuse_activation
from dovetail_models.settings import read_flag, read_float, read_int, refuse_unread

_EOS = [151329, 151336, 151338]


@dataclass(frozen=True, slots=True, kw_only=True)
class GlmDecoderConfig(DecoderConfig):
    """Hold what ``GlmModel`` needs in addition to ``ModelInfo``. With ``sandwich``, there are norms after attention and
    MLP too."""

    attention_bias: bool
    sandwich: bool


def describe_glm(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of GLM-4-9B, in the format of transformers. Raises ``ConfigError``."""
    return _info(config, "GlmForCausalLM", sandwich=False)


def describe_glm4(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of GLM-4-0414. Raises ``ConfigError``."""
    return _info(config, "Glm4ForCausalLM", sandwich=True)


def _info(config: dict[str, Any], architecture: str, *, sandwich: bool) -> ModelInfo:
    refuse_unread(config, {"attention_bias", "partial_rotary_factor"}, architecture)
    refuse_activation(config)
    sizes = read_heads(config, default_kv_heads=2, default_head_dim=128)
    rope = read_rope(config, sizes.head_dim, read_int(config, "max_position_embeddings", 131072), partial=0.5)
    own = GlmDecoderConfig(
        intermediate_size=read_int(config, "intermediate_size"),
        norm_eps=read_float(config, "rms_norm_eps", 1.5625e-07),
        rope=rope,
        windows=(None,) * read_int(config, "num_hidden_layers"),
        tied=read_flag(config, "tie_word_embeddings"),
        attention_bias=read_flag({"attention_bias": True, **config}, "attention_bias"),
        sandwich=sandwich,
    )
    if config.get("eos_token_id") is None:
        config = {**config, "eos_token_id": _EOS}
    return make_info(config, architecture, sizes, rope.context_len, own)
