"""Describe Qwen, the first generation, from config.json alone. Does not import torch."""

from __future__ import annotations

from typing import Any

from dovetail.interfaces.model import ModelInfo
from dovetail.layers.rope import read_rope
from dovetail_models.dense_describe import DenseConfig
from dovetail_models.describe import make_info, read_heads
from dovetail_models.layer_norm_describe import renamed
from dovetail_models.settings import read_flag, read_float, read_int, refuse_other, refuse_unread

ARCHITECTURE = "QWenLMHeadModel"


def describe_qwen(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of Qwen. Raises ``ConfigError``."""
    refuse_unread(config, (), ARCHITECTURE)
    refuse_other(config, {"no_bias": True, "rotary_pct": 1.0, "scale_attn_weights": True}, ARCHITECTURE)
    named = renamed(config, {"kv_channels": "head_dim", "rotary_emb_base": "rope_theta"}, {})
    sizes = read_heads({**named, "num_key_value_heads": None})
    rope = read_rope(named, sizes.head_dim, _context_len(config))
    own = DenseConfig(
        intermediate_size=read_int(config, "intermediate_size") // 2,  # the sum of both halves of the MLP
        norm_eps=read_float(config, "layer_norm_epsilon", 1e-6),
        rope=rope,
        windows=(None,) * read_int(config, "num_hidden_layers"),
        qkv_bias=True,
        tied=read_flag(config, "tie_word_embeddings"),
    )
    return make_info(config, ARCHITECTURE, sizes, rope.context_len, own)


def _context_len(config: dict[str, Any]) -> int:
    """Return the context within which no frequency and no scale depends on the length of the text."""
    trained = read_int(config, "seq_length", 2048)
    depends = read_flag(config, "use_dynamic_ntk", default=True) or read_flag(config, "use_logn_attn", default=True)
    return trained if depends else read_int(config, "max_position_embeddings", trained)
