"""Find out whether a checkpoint publishes scales of keys and values. Does not import torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dovetail.errors import ConfigError

KV_SCALE = re.compile(r"(?:.*\.)?layers\.(\d+)\..*\.([kv])_scale")
"""Matches the name of a tensor that is a scale of the keys or values of a layer: ``model.layers.0.self_attn.k_scale``
(compressed-tensors), ``model.layers.0.self_attn.k_proj.k_scale`` (ModelOpt)."""


def declares_kv_scales(quantization: Mapping[str, Any] | None) -> bool:
    """Return True if the ``quantization_config`` of a checkpoint says that keys and values have static FP8 scales, as
    compressed-tensors, AutoFP8 and ModelOpt write it."""
    if quantization is None:
        return False
    scheme = quantization.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        return scheme.get("num_bits") == 8 and scheme.get("type") == "float" and not scheme.get("dynamic")
    return scheme == "static" or str(quantization.get("kv_cache_quant_algo")).upper() == "FP8"


def has_kv_scales(directory: Path) -> bool:
    """Return True if a tensor in the files of a checkpoint is a scale of keys or values. Raises ``ConfigError`` for a file
    that cannot be read."""
    return any(KV_SCALE.fullmatch(name) for file in sorted(directory.glob("*.safetensors")) for name in _names(file))


def _names(file: Path) -> Iterable[str]:
    """Return the names in the header of a safetensors file."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            return json.loads(opened.read(min(size, file.stat().st_size))).keys()
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{file} is not a valid safetensors file ({type(error).__name__}: {error!s:.200}); download or convert it again"
        ) from error
