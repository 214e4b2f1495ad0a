"""Define the config sections of the quantizations."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dovetail.config.plugin import PluginConfig


class Fp8Config(PluginConfig):
    """Store weights as 8-bit floating-point numbers with scales."""

    kind: Literal["fp8"] = "fp8"  # pyright: ignore[reportIncompatibleVariableOverride]
    ignore: tuple[str, ...] = Field(
        default=(),
        description="Regular expressions of modules of an unquantized checkpoint that are not quantized, such as `model\\.layers\\.0\\..*`. The head and routers are never quantized.",
    )


class Mxfp4Config(PluginConfig):
    """Store the weights of experts as 4-bit floating-point numbers with a scale for each 32 columns of a row."""

    kind: Literal["mxfp4"] = "mxfp4"  # pyright: ignore[reportIncompatibleVariableOverride]
    ignore: tuple[str, ...] = Field(
        default=(),
        description="Regular expressions of experts of an unquantized checkpoint that are not quantized, such as `model\\.layers\\.0\\..*`. Other layers are never quantized.",
    )
