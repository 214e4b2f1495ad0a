"""Config sections of the attention plugins."""

from __future__ import annotations

from typing import Literal

from dovetail.config.plugin import PluginConfig


class TorchNativeConfig(PluginConfig):
    """``torch_native`` chooses its kernels by shape and has nothing to set."""

    kind: Literal["torch_native"] = "torch_native"  # pyright: ignore[reportIncompatibleVariableOverride]
