"""Compute layers with a state with Dovetail's own kernels."""

from __future__ import annotations

from dovetail.errors import ConfigError
from dovetail.interfaces.mixer import MixerContext
from dovetail.ops.triton.mixers import TritonMixer
from dovetail_mixers.config import TritonMixerConfig


class TritonMixers(TritonMixer):
    """Compute with the kernels of ``dovetail.ops.triton`` on CUDA."""

    def __init__(self, config: TritonMixerConfig, context: MixerContext) -> None:
        super().__init__()
        if context.device.type != "cuda":
            raise ConfigError(
                f"mixer: triton computes on cuda, and the device is {context.device}; set mixer: torch_native"
            )
