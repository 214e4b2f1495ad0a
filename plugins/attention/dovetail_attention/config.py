"""Config sections of the attention plugins."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from dovetail.config.plugin import PluginConfig


class TorchNativeConfig(PluginConfig):
    """``torch_native`` chooses its kernels by shape and has nothing to set."""

    kind: Literal["torch_native"] = "torch_native"  # pyright: ignore[reportIncompatibleVariableOverride]


class FlashAttnConfig(PluginConfig):
    """``flash_attn`` finds its kernels in what is installed."""

    kind: Literal["flash_attn"] = "flash_attn"  # pyright: ignore[reportIncompatibleVariableOverride]
    provider: Literal["auto", "flash_attn_interface", "vllm", "sgl_kernel", "flash_attn"] = Field(
        default="auto", description="Whose kernels; `auto` takes the first of these that is installed and runs here."
    )
    library: Path | None = Field(
        default=None, description="File of vLLM's FlashAttention-3 library, where vLLM itself is not installed."
    )
