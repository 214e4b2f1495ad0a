"""Find out whether a checkpoint has scales of keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail_cache.config import ScaledConfig


def declares_scales(checkpoint: Mapping[str, Any] | None) -> bool:
    """Return True if the ``quantization_config`` of a checkpoint says that keys and values have static scales, as
    compressed-tensors, AutoFP8 and ModelOpt write it."""
    if checkpoint is None:
        return False
    scheme = checkpoint.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        return scheme.get("num_bits") == 8 and scheme.get("type") == "float" and not scheme.get("dynamic")
    return scheme == "static" or str(checkpoint.get("kv_cache_quant_algo")).upper() == "FP8"


def refuses(checkpoint: Mapping[str, Any] | None, config: ScaledConfig, named: bool) -> str | None:
    """Return why the store is not used. With ``auto`` it is used for checkpoints that declare scales only."""
    if named or declares_scales(checkpoint):
        return None
    return "the checkpoint declares no scales of keys and values"
