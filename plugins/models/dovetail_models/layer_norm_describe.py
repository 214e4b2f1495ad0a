"""Read from config.json what models of LayerNorm and an MLP without a gate share. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.errors import ConfigError
from dovetail_models.describe import DecoderConfig, HeadSizes, Windows, read_heads
from dovetail_models.settings import read_flag, read_int

ACTIVATION_NAMES = (
    "gelu",
    "gelu_fast",
    "gelu_new",
    "gelu_pytorch_tanh",
    "quick_gelu",
    "relu",
    "relu2",
    "silu",
    "swish",
)
"""The names of ``layers.mlp.ACTIVATIONS``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNormConfig(DecoderConfig):
    """Hold what ``LayerNormModel`` needs in addition to ``ModelInfo``.

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


def renamed(config: Mapping[str, Any], names: Mapping[str, str], defaults: Mapping[str, int]) -> dict[str, Any]:
    """Return ``config`` with the values of the keys of ``names`` under the names that they map to as well, and with
    ``defaults`` for integers that are absent under both. Raises ``ConfigError``."""
    found = {ours: config[theirs] for theirs, ours in names.items() if config.get(theirs) is not None}
    found = {**config, **found}
    return found | {key: read_int(found, key, default) for key, default in defaults.items()}


def read_activation(config: Mapping[str, Any], key: str, default: str) -> str:
    """Return the name of an activation. Raises ``ConfigError``."""
    name = config.get(key) or default
    if name not in ACTIVATION_NAMES:
        raise ConfigError(f"config.json: {key} is {name!r}; implemented: {', '.join(ACTIVATION_NAMES)}")
    return name


def all_heads(config: Mapping[str, Any]) -> HeadSizes:
    """Return the heads of a model that has as many KV heads as heads."""
    return read_heads({**config, "num_key_value_heads": None, "head_dim": None})


def no_windows(config: Mapping[str, Any]) -> Windows:
    return (None,) * read_int(config, "num_hidden_layers")


def attention_scales(config: Mapping[str, Any], heads: HeadSizes) -> tuple[float, ...]:
    return (heads.head_dim**-0.5,) * read_int(config, "num_hidden_layers")


def refuse_tied(config: Mapping[str, Any], architecture: str) -> None:
    """Raise ``ConfigError`` if the head should have the weight of the embedding."""
    if read_flag(config, "tie_word_embeddings"):
        raise ConfigError(f"config.json: tie_word_embeddings is True; {architecture} has a head with a bias of its own")
