"""Define the config sections of the attention backends."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from dovetail.config.plugin import PluginConfig


class TorchNativeConfig(PluginConfig):
    """Configure ``torch_native``. It chooses its kernels by shape and has no settings."""

    kind: Literal["torch_native"] = "torch_native"  # pyright: ignore[reportIncompatibleVariableOverride]


class TritonConfig(PluginConfig):
    """Configure ``triton``. It chooses its tiles by shape and has no settings."""

    kind: Literal["triton"] = "triton"  # pyright: ignore[reportIncompatibleVariableOverride]


class FlashAttnConfig(PluginConfig):
    """Configure ``flash_attn``. It uses the kernels of an installed distribution."""

    kind: Literal["flash_attn"] = "flash_attn"  # pyright: ignore[reportIncompatibleVariableOverride]
    provider: Literal["auto", "flash_attn_interface", "vllm", "sgl_kernel", "flash_attn"] = Field(
        default="auto",
        description="The distribution whose kernels are used; `auto` takes the first of these that is installed and runs on this device.",
    )
    library: Path | None = Field(
        default=None,
        description="The file of vLLM's FlashAttention-3 library, for machines on which vLLM itself is not installed; `auto` then means `vllm`.",
    )

    @model_validator(mode="after")
    def _check_library(self) -> Self:
        if self.library is not None and self.provider not in ("auto", "vllm"):
            raise ValueError(f"library is a file of vLLM, but provider is {self.provider}; allowed with it: auto, vllm")
        return self


class FlashAttnMLAConfig(FlashAttnConfig):
    """Configure ``flash_attn_mla``. It uses the kernels of an installed distribution of FlashAttention-3."""

    kind: Literal["flash_attn_mla"] = "flash_attn_mla"  # pyright: ignore[reportIncompatibleVariableOverride]


class FlashInferConfig(PluginConfig):
    """Configure ``flashinfer``. It uses the kernels of the installed library, which compiles those that are not built
    yet."""

    kind: Literal["flashinfer"] = "flashinfer"  # pyright: ignore[reportIncompatibleVariableOverride]
    variant: Literal["auto", "fa2", "fa3"] = Field(
        default="auto",
        description="The kernels for prompts; `auto` lets the library choose, `fa3` needs Hopper and keys in the model's dtype. Decode rows use fa2, and with `batch_invariant` all rows use fa3.",
    )
    workspace_mib: int = Field(
        default=256,
        ge=16,
        description="The device memory in which the partial results of long rows are merged, in MiB.",
    )


class FlashInferMLAConfig(PluginConfig):
    """Configure ``flashinfer_mla``. It uses the kernels of the installed library, which compiles those that are not built
    yet."""

    kind: Literal["flashinfer_mla"] = "flashinfer_mla"  # pyright: ignore[reportIncompatibleVariableOverride]
    variant: Literal["auto", "fa2", "fa3"] = Field(
        default="auto", description="The kernels; `auto` lets the library choose, `fa3` needs Hopper."
    )
    workspace_mib: int = Field(
        default=256,
        ge=16,
        description="The device memory in which the partial results of long rows are merged, in MiB.",
    )
