"""Read the ``quantization_config`` of checkpoints with MXFP4 experts, as gpt-oss is published. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.errors import ConfigError
from dovetail_quantization.checkpoint import allow_only, any_of, modules_left_out, refuse_ignore
from dovetail_quantization.config import Mxfp4Config


@dataclass(frozen=True, slots=True)
class Mxfp4Format:
    """Describe which experts are stored in MXFP4: those that ``ignored`` does not match. With ``online``, the checkpoint is
    not quantized, and its experts are quantized while they are loaded."""

    ignored: re.Pattern[str]
    online: bool


def describe(checkpoint: Mapping[str, Any] | None, config: Mxfp4Config) -> str | None:
    """Return why these weights cannot be loaded, or None (see ``interfaces.quantization.Quantization``)."""
    try:
        read_format(checkpoint, config)
    except ConfigError as error:
        return str(error)
    return None


def expert_format(checkpoint: Mapping[str, Any] | None, config: Mxfp4Config) -> str:
    """Return the ``ExpertFormat`` of experts that are quantized."""
    return "mxfp4"


def read_format(checkpoint: Mapping[str, Any] | None, config: Mxfp4Config) -> Mxfp4Format:
    """Return the format of a checkpoint. Raises ``ConfigError`` for one that is not MXFP4 or not implemented."""
    if checkpoint is None:
        return Mxfp4Format(any_of(config.ignore), online=True)
    refuse_ignore(config.ignore)
    allow_only(checkpoint, "quant_method", ("mxfp4",))
    return Mxfp4Format(modules_left_out(checkpoint, "modules_to_not_convert"), online=False)
