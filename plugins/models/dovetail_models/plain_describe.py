"""Describe models of LayerNorm and an MLP without a gate from config.json alone. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.errors import ConfigError
from dovetail.interfaces.model import ModelInfo
from dovetail.layers.rope import read_rope
from dovetail_models.describe import DecoderConfig, HeadSizes, Windows, cut_windows, make_info, read_heads
from dovetail_models.settings import read_flag, read_float, read_int, refuse_unread

PLAIN_NAMES = ("gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu", "swish")
"""The names of ``layers.plain_mlp.PLAIN_ACTIVATIONS``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainConfig(DecoderConfig):
    """Hold what ``PlainModel`` needs in addition to ``ModelInfo``.

    ``scales`` holds what multiplies the attention logits of each layer. With ``parallel``, attention and MLP of a layer
    read the same residual stream, and without ``mlp_norm`` the same norm of it. With ``rotated_pairs``, the pairs (0, 1),
    (2, 3) and so on of a head are rotated. ``positions`` is the number of learned positions. With ``gated``,
    the MLP is gated by SiLU.
    """

    activation: str
    scales: tuple[float, ...]
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    mlp_norm: bool = True
    parallel: bool = False
    rotated_pairs: bool = False
    positions: int = 0
    gated: bool = False


def describe_gpt2(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of GPT-2. Raises ``ConfigError``."""
    architecture = "GPT2LMHeadModel"
    names = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    sizes = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 50257}
    given = renamed(config, names, sizes)
    refuse_unread(config, (), architecture)
    refuse_other(config, architecture, add_cross_attention=False)
    heads, layers = whole_heads(given), given["num_hidden_layers"]
    positions = read_int(config, "n_positions", read_int(config, "max_position_embeddings", 1024))
    scale = heads.head_dim**-0.5 if read_flag(config, "scale_attn_weights", default=True) else 1.0
    by_layer = read_flag(config, "scale_attn_by_inverse_layer_idx")
    own = PlainConfig(
        intermediate_size=read_int(config, "n_inner", 4 * given["hidden_size"]),
        norm_eps=read_float(config, "layer_norm_epsilon", 1e-5),
        rope=None,
        windows=(None,) * layers,
        tied=read_flag(config, "tie_word_embeddings", default=True),
        activation=read_activation(config, "activation_function", "gelu_new"),
        scales=tuple(scale / (index + 1) if by_layer else scale for index in range(layers)),
        positions=positions,
    )
    return make_info(given, architecture, heads, positions, own)


def describe_gpt_neox(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of GPT-NeoX, such as Pythia. Raises ``ConfigError``."""
    architecture = "GPTNeoXForCausalLM"
    refuse_unread(config, {"attention_bias", "partial_rotary_factor"}, architecture)
    heads = whole_heads(config)
    # the first versions of transformers have these names
    named = renamed(config, {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}, {})
    rope = read_rope(named, heads.head_dim, read_int(config, "max_position_embeddings", 2048), 0.25)
    bias = read_flag(config, "attention_bias", default=True)
    own = PlainConfig(
        intermediate_size=read_int(config, "intermediate_size"),
        norm_eps=read_float(config, "layer_norm_eps", 1e-5),
        rope=rope,
        windows=no_windows(config),
        tied=read_flag(config, "tie_word_embeddings"),
        activation=read_activation(config, "hidden_act", "gelu"),
        scales=attention_scales(config, heads),
        qkv_bias=bias,
        out_bias=bias,
        parallel=read_flag(config, "use_parallel_residual", default=True),
    )
    return make_info(config, architecture, heads, rope.context_len, own)


def describe_starcoder2(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of StarCoder 2. Raises ``ConfigError``."""
    architecture = "Starcoder2ForCausalLM"
    refuse_unread(config, {"sliding_window", "use_bias"}, architecture)
    refuse_other(config, architecture, norm_type="layer_norm", mlp_type="default")
    heads = read_heads(config, default_kv_heads=2)
    rope = read_rope(config, heads.head_dim, read_int(config, "max_position_embeddings", 4096))
    bias = read_flag(config, "use_bias", default=True)
    window = None if config.get("sliding_window") is None else read_int(config, "sliding_window")
    own = PlainConfig(
        intermediate_size=read_int(config, "intermediate_size"),
        norm_eps=read_float(config, "norm_epsilon", 1e-5),
        rope=rope,
        windows=cut_windows((window,) * read_int(config, "num_hidden_layers"), rope.context_len),
        tied=read_flag(config, "tie_word_embeddings", default=True),
        activation=read_activation(config, "hidden_act", "gelu_pytorch_tanh"),
        scales=attention_scales(config, heads),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
    )
    return make_info(config, architecture, heads, rope.context_len, own)


def renamed(config: Mapping[str, Any], names: Mapping[str, str], defaults: Mapping[str, int]) -> dict[str, Any]:
    """Return ``config`` with the values of the keys of ``names`` under the names that they map to as well, and with
    ``defaults`` for integers that are absent under both. Raises ``ConfigError``."""
    found = {ours: config[theirs] for theirs, ours in names.items() if config.get(theirs) is not None}
    found = {**config, **found}
    return found | {key: read_int(found, key, default) for key, default in defaults.items()}


def read_activation(config: Mapping[str, Any], key: str, default: str) -> str:
    """Return the name of an activation. Raises ``ConfigError``."""
    name = config.get(key) or default
    if name not in PLAIN_NAMES:
        raise ConfigError(f"config.json: {key} is {name!r}; implemented: {', '.join(PLAIN_NAMES)}")
    return name


def refuse_other(config: Mapping[str, Any], architecture: str, **expected: Any) -> None:
    """Raise ``ConfigError`` for a setting that is neither null nor absent nor the value given here."""
    for key, value in expected.items():
        if config.get(key) not in (None, value):
            raise ConfigError(f"config.json: {key} is {config[key]!r}; {architecture} implements {value!r} here")


def whole_heads(config: Mapping[str, Any]) -> HeadSizes:
    """Return the heads of a model that has as many KV heads as heads."""
    return read_heads({**config, "num_key_value_heads": None, "head_dim": None})


def no_windows(config: Mapping[str, Any]) -> Windows:
    return (None,) * read_int(config, "num_hidden_layers")


def attention_scales(config: Mapping[str, Any], heads: HeadSizes) -> tuple[float, ...]:
    return (heads.head_dim**-0.5,) * read_int(config, "num_hidden_layers")
