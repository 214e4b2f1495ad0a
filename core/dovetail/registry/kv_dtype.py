"""Decide whether ``memory.kv_dtype: auto`` is FP8 with the scales of the checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.config.kv_scales import declares_kv_scales, has_kv_scales
from dovetail.errors import ConfigError
from dovetail.interfaces.cache import CacheGroupKind
from dovetail.interfaces.features import Feature

if TYPE_CHECKING:
    from dovetail.config import Config
    from dovetail.registry.machine import Machine
    from dovetail.registry.model_choice import ModelChoice
    from dovetail.registry.resolution import Resolved

FP8_E4M3 = (8, 9)
"""The lowest compute capability of CUDA devices that convert to fp8_e4m3."""

TAKEN = "memory.kv_dtype auto is fp8_e4m3, because the checkpoint has scales of keys and values"
LEFT = "memory.kv_dtype auto is the model's dtype; the checkpoint's scales of keys and values are not used: "


def check_kv_dtype(kv_dtype: str, machine: Machine) -> None:
    """Check that the device can convert to the pool's dtype. The kernels that write the pool need this with every
    attention backend. Raises ``ConfigError``."""
    if kv_dtype == "fp8_e4m3" and (why := _why_not_fp8(machine)):
        raise ConfigError(f"memory.kv_dtype is fp8_e4m3, which {why}. Set memory.kv_dtype to fp8_e5m2 or auto")


def with_fp8(config: Config, machine: Machine, model: ModelChoice) -> ModelChoice | str:
    """Return ``model`` with keys and values in FP8 if config leaves their dtype open and the checkpoint has scales for them.
    Otherwise return why not; nothing if config names a dtype or the checkpoint declares no scales."""
    if config.memory.kv_dtype != "auto" or not declares_kv_scales(model.info.quantization):
        return ""
    if any(group.kind is CacheGroupKind.LATENT for group in model.info.cache_groups):
        return "a latent (MLA) gets a scale computed when it is stored. Set memory.kv_dtype to fp8_e4m3 to keep latents in 8 bits"
    if why := _why_not_fp8(machine):
        return f"FP8 {why}"
    if config.model.load_format != "dummy" and not has_kv_scales(model.directory):
        return "config.json declares them, and no file has a tensor k_scale or v_scale"
    return replace(model, kv_dtype="fp8_e4m3")


def why_unscaled(resolved: Resolved) -> str:
    """Return why the store that was chosen for keys and values in FP8 does not use scales; nothing if it does."""
    store = resolved.store
    return "" if Feature.ATTN_SCALES in store.spec.needs else f"store {store.name} keeps keys and values without scales"


def with_note(resolved: Resolved, note: str) -> Resolved:
    """Return ``resolved`` with a note on the choice of the store."""
    noted = [replace(one, note=note) if one.slot == "store" else one for one in resolved.resolutions]
    return replace(resolved, resolutions=tuple(noted))


def _why_not_fp8(machine: Machine) -> str:
    have = machine.compute_capability
    if have is None or have >= FP8_E4M3:
        return ""
    return (
        f"needs compute capability {'.'.join(map(str, FP8_E4M3))}; {machine.device_name} has {'.'.join(map(str, have))}"
    )
