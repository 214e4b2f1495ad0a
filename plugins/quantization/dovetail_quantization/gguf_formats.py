"""Read the ``quantization_config`` of checkpoints in GGUF. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.errors import ConfigError
from dovetail.gguf.block_types import PLAIN_TYPES, QUANT_METHOD, TYPES
from dovetail.interfaces.expert_shapes import ExpertFormat

DOWN = ("down_proj", "w2")
"""The names of the projections of experts that return to the hidden size."""
NONE = "set quantization: none, which dequantizes all weights while loading"


def describe(checkpoint: Mapping[str, Any] | None, config: Any) -> str | None:
    """Return None if the checkpoint is a GGUF file, or why it cannot be loaded. See ``Quantization``."""
    if checkpoint is None or checkpoint.get("quant_method") != QUANT_METHOD:
        return "the checkpoint is no GGUF file; this quantization reads weights in the blocks of such files, and makes none"
    try:
        module_types(checkpoint)
        expert_types(checkpoint)
    except ConfigError as error:
        return str(error)
    return None


def module_types(checkpoint: Mapping[str, Any]) -> dict[str, str]:
    """Return the types of the modules whose weights are stored in blocks. One of several types is ``Q4_K+Q6_K``: its rows are
    made of tensors of these types. Raises ``ConfigError``."""
    types = checkpoint.get("types")
    if not isinstance(types, Mapping):
        raise ConfigError(f"quantization_config: types is {types!r:.200}; needed: the type of each tensor by its name")
    for name, kind in types.items():
        if not isinstance(kind, str) or not set(kind.split("+")) <= set(TYPES):
            raise ConfigError(f"{name} has type {kind!r:.50}; implemented: {', '.join(TYPES)}")
    return {name.removesuffix(".weight"): kind for name, kind in types.items() if kind not in PLAIN_TYPES}


def expert_format(checkpoint: Mapping[str, Any], config: Any) -> ExpertFormat:
    """Return the ``ExpertFormat`` of experts that are stored in blocks."""
    kinds = {kind for layer in expert_types(checkpoint).values() for kind in layer}
    return "plain" if not kinds else "mxfp4" if kinds == {"MXFP4"} else "gguf"


def expert_types(checkpoint: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the types of gate and up, and of down, of each layer of experts in blocks, by the beginning of their names, such as
    ``model.layers.0.mlp``. Raises ``ConfigError`` for layers that cannot be kept in blocks."""
    layers: dict[str, dict[str, str]] = {}
    for name, kind in checkpoint["types"].items():
        layer, experts, part = name.removesuffix(".weight").partition(".experts.*.")
        if experts:
            layers.setdefault(layer, {})[part] = kind
    found: dict[str, tuple[str, str]] = {}
    for layer, parts in layers.items():
        if set(parts.values()) <= PLAIN_TYPES:
            continue
        down = [kind for part, kind in parts.items() if part in DOWN]
        others = sorted({kind for part, kind in parts.items() if part not in DOWN})
        if set(parts.values()) & PLAIN_TYPES:
            raise ConfigError(f"some experts of {layer} are stored as numbers and others in blocks; {NONE}")
        if len(others) != 1 or len(down) != 1:
            raise ConfigError(
                f"gate and up of the experts of {layer} have the types {' and '.join(others)}; implemented: one type; {NONE}"
            )
        found[layer] = others[0], down[0]
    return found
