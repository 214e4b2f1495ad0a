"""Define the config sections of the backends of experts."""

from __future__ import annotations

from typing import Literal

from dovetail.config.plugin import PluginConfig


class TritonExpertsConfig(PluginConfig):
    """Multiply with Dovetail's own kernels on CUDA."""

    kind: Literal["triton"] = "triton"  # pyright: ignore[reportIncompatibleVariableOverride]


class TorchExpertsConfig(PluginConfig):
    """Multiply with PyTorch on the CPU, and with compiled products for few rows."""

    kind: Literal["torch_native"] = "torch_native"  # pyright: ignore[reportIncompatibleVariableOverride]
