"""Read the ``quantization_config`` of checkpoints that transformers writes with bitsandbytes. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dovetail.errors import ConfigError
from dovetail_quantization.checkpoint import allow_only, modules_left_out
from dovetail_quantization.config import BitsandbytesConfig

_HEAD = ["lm_head"]
"""The modules that transformers does not quantize if the checkpoint lists none."""


@dataclass(frozen=True, slots=True)
class BnbFormat:
    """Describe how modules that ``ignored`` does not match are stored: as codes of 4 bits of type ``kind`` with a scale for each ``block``
    numbers, which with ``double`` are quantized to 8 bits themselves; or as int8 with a scale for each row (LLM.int8)."""

    kind: Literal["nf4", "fp4", "int8"]
    double: bool
    block: int
    ignored: re.Pattern[str]


def describe(checkpoint: Mapping[str, Any] | None, config: BitsandbytesConfig) -> str | None:
    """Return why these weights cannot be loaded, or None (see ``interfaces.quantization.Quantization``)."""
    try:
        read_format(checkpoint, config)
    except ConfigError as error:
        return str(error)
    return None


def expert_format(checkpoint: Mapping[str, Any] | None, config: BitsandbytesConfig) -> str:
    """Return the ``ExpertFormat`` of experts, which are dequantized when they are loaded."""
    return "plain"


def read_format(checkpoint: Mapping[str, Any] | None, config: BitsandbytesConfig) -> BnbFormat:
    """Return the format of a checkpoint. Raises ``ConfigError`` for one of another method, or that is not implemented."""
    if checkpoint is None:
        raise ConfigError(
            "the checkpoint is not quantized; this quantization reads checkpoints that were written with bitsandbytes, and makes none"
        )
    allow_only(checkpoint, "quant_method", ("bitsandbytes",))
    four, eight = (bool(checkpoint.get(f"load_in_{bits}bit", checkpoint.get(f"_load_in_{bits}bit"))) for bits in (4, 8))
    if four == eight:
        raise ConfigError(
            f"quantization_config: load_in_4bit is {four} and load_in_8bit is {eight}; implemented: one of them is true"
        )
    given = checkpoint if checkpoint.get("llm_int8_skip_modules") is not None else {"llm_int8_skip_modules": _HEAD}
    ignored = modules_left_out(given, "llm_int8_skip_modules")
    if eight:
        allow_only(checkpoint, "llm_int8_has_fp16_weight", (None, False))
        return BnbFormat("int8", double=False, block=config.block_size, ignored=ignored)
    allow_only(checkpoint, "bnb_4bit_quant_type", (None, "fp4", "nf4"))
    allow_only(checkpoint, "bnb_4bit_use_double_quant", (None, False, True))
    kind: Literal["nf4", "fp4"] = "nf4" if checkpoint.get("bnb_4bit_quant_type") == "nf4" else "fp4"
    return BnbFormat(kind, bool(checkpoint.get("bnb_4bit_use_double_quant")), config.block_size, ignored)
