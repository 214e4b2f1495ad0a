"""Describe the dense Llama family from config.json alone. Does not import torch.

The architectures differ only in what this file declares: biases, norms over heads, windows, defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.interfaces.model import ModelInfo
from dovetail.layers.rope import RopeConfig, read_rope
from dovetail_models.describe import (
    DecoderConfig,
    Windows,
    cut_windows,
    make_info,
    read_heads,
    read_layer_types,
    refuse_activation,
)
from dovetail_models.settings import read_flag, read_float, read_int, read_predict_layers, refuse_unread


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig(DecoderConfig):
    """Hold what ``DenseModel`` needs in addition to ``ModelInfo``."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


@dataclass(frozen=True, slots=True)
class Variant:
    """Describe how one architecture differs from the others. ``reads`` are the settings of ``settings.MATHS`` that it
    supports.

    ``qkv_bias=None`` uses ``attention_bias`` for q, k, v and the output projection. ``windows`` returns the windows of
    the layers. The other fields are the defaults of absent keys, as in transformers. None means: as many KV heads as
    heads (``kv_heads``), and a head_dim of hidden size / heads (``head_dim``).
    """

    architecture: str
    reads: frozenset[str] = frozenset()
    qkv_bias: bool | None = None
    qk_norm: bool = False
    windows: Callable[[Mapping[str, Any], int], Windows] = lambda config, layers: (None,) * layers
    max_positions: int = 32768
    kv_heads: int | None = None
    head_dim: int | None = None


def uniform_windows(config: Mapping[str, Any], layers: int, default: int | None = 4096) -> Windows:
    """Return the window of ``sliding_window`` for all layers; ``default`` is that of an absent key. Raises
    ``ConfigError``."""
    if config.get("sliding_window", default) is None:
        return (None,) * layers
    return (read_int(config, "sliding_window", default),) * layers


def layered_windows(config: Mapping[str, Any], layers: int) -> Windows:
    """Return the windows of Qwen's layers, by ``layer_types`` or by ``max_window_layers``. Raises ``ConfigError``."""
    types = config.get("layer_types")
    window = read_int(config, "sliding_window", 4096) if read_flag(config, "use_sliding_window") else None
    if types is None:
        if window is None:
            return (None,) * layers
        first = read_int(config, "max_window_layers", 28, minimum=0)
        return (None,) * min(first, layers) + (window,) * (layers - first)
    known = {"full_attention": None} | ({"sliding_attention": window} if window else {})
    hint = (
        "full_attention, and sliding_attention where use_sliding_window is true "
        f"(it is {config.get('use_sliding_window')!r})"
    )
    return read_layer_types(config, layers, known, hint)


_LAYERED = frozenset({"sliding_window", "use_sliding_window", "layer_types"})

LLAMA = Variant("LlamaForCausalLM", reads=frozenset({"attention_bias", "mlp_bias"}), max_positions=2048)
MISTRAL = Variant(
    "MistralForCausalLM",
    reads=frozenset({"sliding_window"}),
    qkv_bias=False,
    windows=uniform_windows,
    max_positions=131072,
    kv_heads=8,
)
QWEN2 = Variant("Qwen2ForCausalLM", reads=_LAYERED, qkv_bias=True, windows=layered_windows, kv_heads=32)
QWEN3 = Variant(
    "Qwen3ForCausalLM",
    reads=_LAYERED | {"attention_bias"},
    qk_norm=True,
    windows=layered_windows,
    kv_heads=32,
    head_dim=128,
)
MIMO = Variant(
    "MiMoForCausalLM", reads=_LAYERED | {"attention_bias"}, qkv_bias=True, windows=layered_windows, kv_heads=32
)


def describe_llama(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of Llama 2 or 3. Raises ``ConfigError``."""
    return describe(config, LLAMA)


def describe_mistral(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of Mistral. Raises ``ConfigError``."""
    return describe(config, MISTRAL)


def describe_qwen2(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of Qwen2 or Qwen2.5. Raises ``ConfigError``."""
    return describe(config, QWEN2)


def describe_mimo(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of MiMo: Qwen2's layers, and one that predicts a further token. Raises ``ConfigError``."""
    return describe(config, MIMO)


def describe_qwen3(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of Qwen3. Raises ``ConfigError``."""
    return describe(config, QWEN3)


def describe(config: Mapping[str, Any], variant: Variant) -> ModelInfo:
    """Return the ``ModelInfo`` of a checkpoint of ``variant``. Raises ``ConfigError`` for a setting that is not
    implemented."""
    refuse_unread(config, variant.reads, variant.architecture)
    refuse_activation(config)
    sizes = read_heads(config, default_kv_heads=variant.kv_heads, default_head_dim=variant.head_dim)
    rope = read_rope(config, sizes.head_dim, read_int(config, "max_position_embeddings", variant.max_positions))
    return make_info(config, variant.architecture, sizes, rope.context_len, _dense(config, variant, rope))


def _dense(config: Mapping[str, Any], variant: Variant, rope: RopeConfig) -> DenseConfig:
    bias = read_flag(config, "attention_bias") if variant.qkv_bias is None else False
    return DenseConfig(
        intermediate_size=read_int(config, "intermediate_size"),
        norm_eps=read_float(config, "rms_norm_eps", 1e-6),
        rope=rope,
        windows=cut_windows(variant.windows(config, read_int(config, "num_hidden_layers")), rope.context_len),
        qkv_bias=bias if variant.qkv_bias is None else variant.qkv_bias,
        out_bias=bias,
        mlp_bias=read_flag(config, "mlp_bias"),
        qk_norm=variant.qk_norm,
        tied=read_flag(config, "tie_word_embeddings"),
        predict_layers=read_predict_layers(config),
    )
