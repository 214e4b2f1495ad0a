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


class IntegerConfig(PluginConfig):
    """Store weights as integers of 4 or 8 bits with a scale for each group of columns, or for each row."""

    kind: Literal["integer"] = "integer"  # pyright: ignore[reportIncompatibleVariableOverride]
    bits: Literal[4, 8] = Field(
        default=4, description="Bits of a weight of an unquantized checkpoint, which is rounded while it is loaded."
    )
    group_size: int | None = Field(
        default=128,
        ge=32,
        le=16384,
        multiple_of=32,
        description="Columns of a weight of an unquantized checkpoint that have one scale; null: a scale for each row.",
    )
    activations: Literal["model", "int8"] = Field(
        default="model",
        description="`int8` also quantizes activations of an unquantized checkpoint, with a scale for each token (W8A8); it needs `bits: 8` and `group_size: null`.",
    )
    products: Literal["triton", "humming"] = Field(
        default="triton",
        description="What multiplies with linear weights of 4 bits on CUDA: Dovetail's kernels, or those of the package humming-kernels, which are slower with one row, up to a fifth faster with more than 64, and not deterministic.",
    )
    ignore: tuple[str, ...] = Field(
        default=(),
        description="Regular expressions of modules of an unquantized checkpoint that are not quantized, such as `model\\.layers\\.0\\..*`. The head and routers are never quantized.",
    )


class GgufConfig(PluginConfig):
    """Keep weights in the blocks in which a GGUF file stores them."""

    kind: Literal["gguf"] = "gguf"  # pyright: ignore[reportIncompatibleVariableOverride]


class BitsandbytesConfig(PluginConfig):
    """Read weights of 4 bits (NF4, FP4) or int8 from a checkpoint that was written with bitsandbytes."""

    kind: Literal["bitsandbytes"] = "bitsandbytes"  # pyright: ignore[reportIncompatibleVariableOverride]
    block_size: Literal[32, 64, 128, 256, 512, 1024, 2048, 4096] = Field(
        default=64,
        description="Numbers of 4 bits that have one scale. The checkpoint does not say it before its tensors are read.",
    )
