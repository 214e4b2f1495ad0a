"""Config sections of the attention plugins."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from dovetail.config.plugin import PluginConfig


class TorchNativeConfig(PluginConfig):
    """``torch_native`` chooses its kernels by shape and has nothing to set."""

    kind: Literal["torch_native"] = "torch_native"  # pyright: ignore[reportIncompatibleVariableOverride]


class TritonConfig(PluginConfig):
    """``triton`` chooses its tiles by shape and has nothing to set."""

    kind: Literal["triton"] = "triton"  # pyright: ignore[reportIncompatibleVariableOverride]


class FlashAttnConfig(PluginConfig):
    """``flash_attn`` finds its kernels in what is installed."""

    kind: Literal["flash_attn"] = "flash_attn"  # pyright: ignore[reportIncompatibleVariableOverride]
    provider: Literal["auto", "flash_attn_interface", "vllm", "sgl_kernel", "flash_attn"] = Field(
        default="auto", description="Whose kernels; `auto` takes the first of these that is installed and runs here."
    )
    library: Path | None = Field(
        default=None,
        description="File of vLLM's FlashAttention-3 library, where vLLM itself is not installed; `auto` then means `vllm`.",
    )

    @model_validator(mode="after")
    def _check_library(self) -> Self:
        if self.library is not None and self.provider not in ("auto", "vllm"):
            raise ValueError(
                f"library is a file of vLLM's, and provider is {self.provider}; allowed with it: auto, vllm"
            )
        return self


class FlashInferConfig(PluginConfig):
    """``flashinfer`` takes the kernels of the library that is installed, which compiles those it has not built."""

    kind: Literal["flashinfer"] = "flashinfer"  # pyright: ignore[reportIncompatibleVariableOverride]
    variant: Literal["auto", "fa2", "fa3"] = Field(
        default="auto",
        description="Kernels for prompts; `auto` leaves it to the library, `fa3` needs Hopper and keys in the model's dtype. Decode rows take fa2, and with `batch_invariant` all rows fa3.",
    )
    workspace_mib: int = Field(
        default=256, ge=16, description="Memory in which the parts of long rows are put together, MiB of the device."
    )
