"""Describe the dense Llama family from config.json alone. Does not import torch.

The architectures differ only in what this file declares: biases, norms over heads, windows, defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.errors import ConfigError
from dovetail.interfaces.cache import CacheGroup
from dovetail.interfaces.features import Feature
from dovetail.interfaces.model import ModelInfo
from dovetail.layers.rope import RopeConfig, read_rope
from dovetail_models.settings import (
    read_dtype,
    read_eos,
    read_flag,
    read_float,
    read_int,
    read_predict_layers,
    refuse_unread,
)

Windows = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """Hold what ``DenseModel`` needs in addition to ``ModelInfo``. ``windows`` holds the sliding window of each layer,
    or None. ``predict_layers`` is the number of layers of the checkpoint that predict further tokens, for drafters;
    they are not part of this model.
    """

    intermediate_size: int
    norm_eps: float
    rope: RopeConfig
    windows: Windows
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    predict_layers: int = 0


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


def _uniform_windows(config: Mapping[str, Any], layers: int) -> Windows:
    if config.get("sliding_window", 4096) is None:
        return (None,) * layers
    return (read_int(config, "sliding_window", 4096),) * layers


def _layered_windows(config: Mapping[str, Any], layers: int) -> Windows:
    types = config.get("layer_types")
    window = read_int(config, "sliding_window", 4096) if read_flag(config, "use_sliding_window") else None
    if types is None:
        if window is None:
            return (None,) * layers
        first = read_int(config, "max_window_layers", 28, minimum=0)
        return (None,) * min(first, layers) + (window,) * (layers - first)
    if not isinstance(types, list) or len(types) != layers:
        raise ConfigError(f"config.json: layer_types is {types!r}; needed: a list of {layers} types")
    known = {"full_attention": None} | ({"sliding_attention": window} if window else {})
    unknown = sorted({str(kind) for kind in types} - set(known))
    if unknown:
        raise ConfigError(
            f"config.json: layer_types has {unknown}; implemented: full_attention, and sliding_attention where "
            f"use_sliding_window is true (it is {config.get('use_sliding_window')!r})"
        )
    return tuple(known[kind] for kind in types)


_LAYERED = frozenset({"sliding_window", "use_sliding_window", "layer_types"})

LLAMA = Variant("LlamaForCausalLM", reads=frozenset({"attention_bias", "mlp_bias"}), max_positions=2048)
MISTRAL = Variant(
    "MistralForCausalLM",
    reads=frozenset({"sliding_window"}),
    qkv_bias=False,
    windows=_uniform_windows,
    max_positions=131072,
    kv_heads=8,
)
QWEN2 = Variant("Qwen2ForCausalLM", reads=_LAYERED, qkv_bias=True, windows=_layered_windows, kv_heads=32)
QWEN3 = Variant(
    "Qwen3ForCausalLM",
    reads=_LAYERED | {"attention_bias"},
    qk_norm=True,
    windows=_layered_windows,
    kv_heads=32,
    head_dim=128,
)
MIMO = Variant(
    "MiMoForCausalLM", reads=_LAYERED | {"attention_bias"}, qkv_bias=True, windows=_layered_windows, kv_heads=32
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
    _refuse_activation(config)
    layers = read_int(config, "num_hidden_layers")
    hidden, heads = read_int(config, "hidden_size"), read_int(config, "num_attention_heads")
    kv_heads, head_dim = _kv_heads(config, heads, variant), _head_dim(config, hidden, heads, variant)
    rope = read_rope(config, head_dim, read_int(config, "max_position_embeddings", variant.max_positions))
    dense = _dense(config, variant, rope, layers)
    windowed = any(window is not None for window in dense.windows)
    return ModelInfo(
        architecture=variant.architecture,
        vocab_size=read_int(config, "vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_len=rope.context_len,
        cache_groups=(CacheGroup(layers, kv_heads, head_dim),),
        eos_token_ids=read_eos(config),
        dtype=read_dtype(config),
        needs=frozenset({Feature.ATTN_SLIDING_WINDOW}) if windowed else frozenset(),
        offers=_offers(dense),
        split_sizes=(("intermediate_size", dense.intermediate_size),),
        config=dense,
    )


def _dense(config: Mapping[str, Any], variant: Variant, rope: RopeConfig, layers: int) -> DenseConfig:
    bias = read_flag(config, "attention_bias") if variant.qkv_bias is None else False
    windows = (w if w is not None and w < rope.context_len else None for w in variant.windows(config, layers))
    return DenseConfig(
        intermediate_size=read_int(config, "intermediate_size"),
        norm_eps=read_float(config, "rms_norm_eps", 1e-6),
        rope=rope,
        windows=tuple(windows),
        qkv_bias=bias if variant.qkv_bias is None else variant.qkv_bias,
        out_bias=bias,
        mlp_bias=read_flag(config, "mlp_bias"),
        qk_norm=variant.qk_norm,
        tied=read_flag(config, "tie_word_embeddings"),
        predict_layers=read_predict_layers(config),
    )


def _offers(dense: DenseConfig) -> frozenset[Feature]:
    always = frozenset(
        {
            Feature.MODEL_LAST_ROWS,
            Feature.MODEL_HIDDEN_STATES,
            Feature.MODEL_EMBED,
            Feature.MODEL_BATCH_INVARIANT,
            Feature.MODEL_TENSOR_PARALLEL,
        }
    )
    return always | {Feature.MODEL_MTP_HEAD} if dense.predict_layers else always


def _refuse_activation(config: Mapping[str, Any]) -> None:
    name = config.get("hidden_act", "silu")
    if name not in ("silu", "swish"):
        raise ConfigError(f"config.json: hidden_act is {name!r}; implemented: silu")


def _kv_heads(config: Mapping[str, Any], heads: int, variant: Variant) -> int:
    default = variant.kv_heads if "num_key_value_heads" not in config else None
    kv_heads = read_int(config, "num_key_value_heads", default or heads)
    if heads % kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads is {heads}, num_key_value_heads {kv_heads}; the first must be a multiple "
            "of the second"
        )
    return kv_heads


def _head_dim(config: Mapping[str, Any], hidden: int, heads: int, variant: Variant) -> int:
    default = variant.head_dim if "head_dim" not in config else None
    if default is None and config.get("head_dim") is None and hidden % heads:
        raise ConfigError(
            f"config.json: hidden_size is {hidden}, num_attention_heads {heads}, and there is no head_dim; needed: a "
            "multiple, or head_dim"
        )
    return read_int(config, "head_dim", default or hidden // heads)
