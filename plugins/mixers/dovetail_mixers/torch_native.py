"""Compute layers with a state with PyTorch."""

from __future__ import annotations

from dovetail.interfaces.mixer import MixerContext
from dovetail.ops.mixers import TorchMixer
from dovetail_mixers.config import TorchMixerConfig


class TorchMixers(TorchMixer):
    """Compute with ``dovetail.ops``, on any device."""

    def __init__(self, config: TorchMixerConfig, context: MixerContext) -> None:
        super().__init__()
