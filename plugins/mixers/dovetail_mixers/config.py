"""Define the config sections of the backends of layers with a state."""

from __future__ import annotations

from typing import Literal

from dovetail.config.plugin import PluginConfig


class TritonMixerConfig(PluginConfig):
    """Compute layers with a state with Dovetail's own kernels on CUDA."""

    kind: Literal["triton"] = "triton"  # pyright: ignore[reportIncompatibleVariableOverride]


class TorchMixerConfig(PluginConfig):
    """Compute layers with a state with PyTorch, on any device."""

    kind: Literal["torch_native"] = "torch_native"  # pyright: ignore[reportIncompatibleVariableOverride]
