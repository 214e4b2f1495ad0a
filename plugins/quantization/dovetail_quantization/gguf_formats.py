"""Read the ``quantization_config`` of checkpoints in GGUF. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.errors import ConfigError
from dovetail.gguf.block_types import PLAIN_TYPES, QUANT_METHOD, TYPES


def describe(checkpoint: Mapping[str, Any] | None, config: Any) -> str | None:
    """Return None if the checkpoint is a GGUF file, or why it cannot be loaded. See ``Quantization``."""
    if checkpoint is None or checkpoint.get("quant_method") != QUANT_METHOD:
        return "the checkpoint is no GGUF file; this quantization reads weights in the blocks of such files, and makes none"
    try:
        module_types(checkpoint)
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
