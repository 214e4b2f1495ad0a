"""Describe OPT, Phi-2, GPT-J, StableLM and Falcon from config.json alone. Does not import torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dovetail.errors import ConfigError
from dovetail.interfaces.model import ModelInfo
from dovetail.layers.rope import read_rope
from dovetail_models.describe import HeadSizes, make_info, read_heads, refuse_activation
from dovetail_models.plain_describe import (
    PlainConfig,
    attention_scales,
    no_windows,
    read_activation,
    refuse_other,
    renamed,
    whole_heads,
)
from dovetail_models.settings import read_flag, read_float, read_int, refuse_unread


def describe_opt(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of OPT. Raises ``ConfigError``."""
    architecture = "OPTForCausalLM"
    sizes = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 50272}
    given = renamed(config, {}, sizes)
    refuse_unread(config, (), architecture)
    width = given["hidden_size"]
    expected = {"layer_norm_elementwise_affine": True, "_remove_final_layer_norm": False}
    refuse_other(config, architecture, do_layer_norm_before=True, word_embed_proj_dim=width, **expected)
    heads, bias = whole_heads(given), read_flag(config, "enable_bias", default=True)
    positions = read_int(config, "max_position_embeddings", 2048)
    own = PlainConfig(
        intermediate_size=read_int(config, "ffn_dim", 3072),
        norm_eps=1e-5,
        rope=None,
        windows=no_windows(given),
        tied=read_flag(config, "tie_word_embeddings", default=True),
        activation=read_activation(config, "activation_function", "relu"),
        scales=attention_scales(given, heads),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        positions=positions,
    )
    return make_info(given, architecture, heads, positions, own)


def describe_phi(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of Phi-1, Phi-1.5 or Phi-2. Raises ``ConfigError``."""
    architecture = "PhiForCausalLM"
    refuse_unread(config, {"partial_rotary_factor"}, architecture)
    heads = read_heads(config)
    rope = read_rope(config, heads.head_dim, read_int(config, "max_position_embeddings", 2048), 0.5)
    _refuse_tied(config, architecture)
    own = PlainConfig(
        intermediate_size=read_int(config, "intermediate_size"),
        norm_eps=read_float(config, "layer_norm_eps", 1e-5),
        rope=rope,
        windows=no_windows(config),
        activation=read_activation(config, "hidden_act", "gelu_new"),
        scales=attention_scales(config, heads),
        parallel=True,
        mlp_norm=False,
        head_bias=True,
    )
    return make_info(config, architecture, heads, rope.context_len, own)


def describe_gptj(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of GPT-J. Raises ``ConfigError``."""
    architecture = "GPTJForCausalLM"
    names = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    sizes = {"hidden_size": 4096, "num_hidden_layers": 28, "num_attention_heads": 16, "vocab_size": 50400}
    given = renamed(config, names, sizes)
    refuse_unread(config, (), architecture)
    heads = whole_heads(given)
    positions = read_int(config, "n_positions", read_int(config, "max_position_embeddings", 2048))
    rope = read_rope({}, heads.head_dim, positions)
    rotary_dim = read_int(config, "rotary_dim", 64 if "rotary_dim" not in config else heads.head_dim)
    if rotary_dim % 2 or rotary_dim > heads.head_dim:
        raise ConfigError(
            f"config.json: rotary_dim is {rotary_dim}; allowed: an even number up to head_dim, {heads.head_dim}"
        )
    _refuse_tied(config, architecture)
    own = PlainConfig(
        intermediate_size=read_int(config, "n_inner", 4 * given["hidden_size"]),
        norm_eps=read_float(config, "layer_norm_epsilon", 1e-5),
        rope=replace(rope, partial_dim=rotary_dim % heads.head_dim),
        windows=no_windows(given),
        activation=read_activation(config, "activation_function", "gelu_new"),
        scales=attention_scales(given, heads),
        qkv_bias=False,
        out_bias=False,
        parallel=True,
        mlp_norm=False,
        rotated_pairs=True,
        head_bias=True,
    )
    return make_info(given, architecture, heads, positions, own)


def describe_stablelm(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of StableLM. Raises ``ConfigError``."""
    architecture = "StableLmForCausalLM"
    refuse_unread(config, {"partial_rotary_factor"}, architecture)
    refuse_activation(config)
    heads = read_heads({**config, "head_dim": None}, default_kv_heads=32)
    rope = read_rope(config, heads.head_dim, read_int(config, "max_position_embeddings", 4096), 0.25)
    parallel = read_flag(config, "use_parallel_residual")
    own = PlainConfig(
        intermediate_size=read_int(config, "intermediate_size"),
        norm_eps=read_float(config, "layer_norm_eps", 1e-5),
        rope=rope,
        windows=no_windows(config),
        tied=read_flag(config, "tie_word_embeddings"),
        activation="silu",
        scales=attention_scales(config, heads),
        qkv_bias=read_flag(config, "use_qkv_bias"),
        out_bias=False,
        mlp_bias=False,
        parallel=parallel,
        mlp_norm=not parallel,
        gated=True,
    )
    return make_info(config, architecture, heads, rope.context_len, own)


def describe_falcon(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of Falcon with rotary positions. Raises ``ConfigError``."""
    architecture = "FalconForCausalLM"
    refuse_unread(config, {"bias", "parallel_attn"}, architecture)
    given = renamed(config, {"n_embed": "hidden_size"}, {})
    grouped = read_flag(config, "new_decoder_architecture")
    parallel = read_flag(config, "parallel_attn", default=True)
    if grouped and not parallel:
        raise ConfigError("config.json: new_decoder_architecture is True, and parallel_attn False; allowed: not both")
    heads = _falcon_heads(given, grouped)
    rope = read_rope(config, heads.head_dim, read_int(config, "max_position_embeddings", 2048))
    norms = read_int(config, "num_ln_in_parallel_attn", 2 if grouped else 1)
    if norms > 1 + grouped:
        raise ConfigError(f"config.json: num_ln_in_parallel_attn is {norms}; allowed: 1, or 2 in the new architecture")
    bias = read_flag(config, "bias")
    own = PlainConfig(
        intermediate_size=read_int(config, "ffn_hidden_size", 4 * heads.heads * heads.head_dim),
        norm_eps=read_float(config, "layer_norm_epsilon", 1e-5),
        rope=rope,
        windows=no_windows(given),
        tied=read_flag(config, "tie_word_embeddings", default=True),
        activation=read_activation(config, "activation", "gelu"),
        scales=attention_scales(given, heads),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        parallel=parallel,
        mlp_norm=norms == 2 or not parallel,
    )
    return make_info(given, architecture, heads, rope.context_len, own)


def _falcon_heads(given: dict[str, Any], grouped: bool) -> HeadSizes:
    heads = whole_heads(given)
    if grouped:
        return read_heads({**given, "num_key_value_heads": given.get("num_kv_heads"), "head_dim": None})
    return replace(heads, kv_heads=1) if read_flag(given, "multi_query", default=True) else heads


def _refuse_tied(config: dict[str, Any], architecture: str) -> None:
    if read_flag(config, "tie_word_embeddings"):
        raise ConfigError(f"config.json: tie_word_embeddings is True; {architecture} has a head with a bias of its own")
