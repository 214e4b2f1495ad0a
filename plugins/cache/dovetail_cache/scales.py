"""Decide whether ``auto`` considers the store with scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.config.kv_scales import declares_kv_scales
from dovetail_cache.config import ScaledConfig


def refuses(checkpoint: Mapping[str, Any] | None, config: ScaledConfig, named: bool) -> str | None:
    """Return why the store is not used. With ``auto`` it is used for checkpoints that declare scales only."""
    if named or declares_kv_scales(checkpoint):
        return None
    return "the checkpoint declares no scales of keys and values"
