"""Read the ``quantization_config`` of checkpoints with FP8 weights. Does not import torch.

The formats are those of Hugging Face (``fp8``: blocks, as DeepSeek-V3 publishes them, arXiv 2412.19437; or one scale for each
tensor), of FBGEMM (``fbgemm_fp8``: a scale for each row) and of compressed-tensors (``float-quantized``).
"""

from __future__ import annotations

import enum
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.errors import ConfigError
from dovetail_quantization.checkpoint import (
    allow_only,
    any_of,
    check_kv_scheme,
    modules_left_out,
    names_of,
    refuse_ignore,
)
from dovetail_quantization.config import Fp8Config

_LARGEST_BLOCK = 16384
"""The largest number of rows or columns of a block."""


class Scales(enum.StrEnum):
    """Enumerate what shares one scale of the weights."""

    TENSOR = "tensor"
    ROW = "row"
    BLOCK = "block"


class Activations(enum.StrEnum):
    """Enumerate how activations are quantized: with one scale that the checkpoint has (``input_scale``), or with a scale
    for each token, or for each token and ``block`` of inputs, which is computed in each step."""

    STATIC = "static"
    TOKEN = "token"


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """Describe how the linear layers of a checkpoint are stored. ``scale_name`` is the last part of the name of the scales.
    ``block`` is the number of rows and columns of a block. ``ignored`` matches the names of modules that are not
    quantized. With ``online``, the checkpoint is not quantized, and its weights are quantized while they are loaded. With
    ``precise_too``, layers that are ``LinearShape.precise`` are quantized unless ``ignored`` matches them; the other
    formats never quantize the head, even if their lists do not name it. Activations beyond ``bound`` count as it."""

    scales: Scales
    activations: Activations
    ignored: re.Pattern[str]
    scale_name: str = "weight_scale"
    block: tuple[int, int] = (128, 128)
    online: bool = False
    bound: float | None = None
    precise_too: bool = False


def describe(checkpoint: Mapping[str, Any] | None, config: Fp8Config) -> str | None:
    """Return why these weights cannot be loaded, or None (see ``interfaces.quantization.Quantization``)."""
    try:
        read_format(checkpoint, config)
    except ConfigError as error:
        return str(error)
    return None


def expert_format(checkpoint: Mapping[str, Any] | None, config: Fp8Config) -> str:
    """Return the ``ExpertFormat`` of experts that are quantized."""
    return "fp8_blocks" if read_format(checkpoint, config).scales is Scales.BLOCK else "fp8_rows"


def read_format(checkpoint: Mapping[str, Any] | None, config: Fp8Config) -> Fp8Format:
    """Return the format of a checkpoint. Raises ``ConfigError`` for one that is not FP8 or not implemented."""
    if checkpoint is None:
        return Fp8Format(Scales.ROW, Activations.TOKEN, any_of(config.ignore), online=True)
    refuse_ignore(config.ignore)
    method = checkpoint.get("quant_method")
    if not isinstance(method, str) or method not in _READERS:
        raise ConfigError(
            f"quantization_config: quant_method is {method!r}; implemented: {', '.join(map(repr, _READERS))}"
        )
    return _READERS[method](checkpoint)


def _read_fp8(given: Mapping[str, Any]) -> Fp8Format:
    """Read the format of ``FineGrainedFP8Config``, and the one with a scale for each tensor that vLLM and SGLang read."""
    ignored = modules_left_out(given, "modules_to_not_convert", "ignored_layers")
    allow_only(given, "fmt", ("e4m3", "float8_e4m3fn", None))
    check_kv_scheme(given)
    allow_only(given, "modules_to_convert", (None, []))
    scheme = given.get("activation_scheme", "dynamic")
    block = given.get("weight_block_size")
    if block is None:
        allow_only(given, "activation_scheme", ("static", "dynamic", None))
        activations = Activations.STATIC if scheme == "static" else Activations.TOKEN
        return Fp8Format(Scales.TENSOR, activations, ignored)
    allow_only(given, "activation_scheme", ("dynamic", None))
    return Fp8Format(Scales.BLOCK, Activations.TOKEN, ignored, "weight_scale_inv", _block(block))


def _read_fbgemm(given: Mapping[str, Any]) -> Fp8Format:
    bound = given.get("activation_scale_ub")
    if bound is not None and (
        isinstance(bound, bool) or not isinstance(bound, int | float) or not 0 < bound <= sys.float_info.max
    ):
        raise ConfigError(f"quantization_config: activation_scale_ub is {bound!r:.80}; allowed: a number above 0, null")
    return Fp8Format(Scales.ROW, Activations.TOKEN, modules_left_out(given, "modules_to_not_convert"), bound=bound)


def _read_compressed(given: Mapping[str, Any]) -> Fp8Format:
    allow_only(given, "format", ("float-quantized",))
    check_kv_scheme(given)
    for key in ("sparsity_config", "transform_config"):
        allow_only(given, key, (None, {}))
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise ConfigError(f"quantization_config: config_groups is {groups!r:.200}; implemented: one group")
    (group,) = groups.values()
    if not isinstance(group, Mapping):
        raise ConfigError(f"quantization_config: a group of config_groups is {group!r:.80}; allowed: an object")
    allow_only(group, "targets", (["Linear"],))
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    if not isinstance(weights, Mapping):
        raise ConfigError(f"quantization_config: weights is {weights!r:.80}; implemented: FP8 weights")
    if not isinstance(inputs, Mapping):
        raise ConfigError(f"quantization_config: input_activations is {inputs!r:.80}; implemented: FP8 activations")
    allow_only(inputs, "dynamic", (True, False, None))
    for what in (weights, inputs):
        allow_only(what, "num_bits", (8,))
        allow_only(what, "type", ("float",))
        allow_only(what, "symmetric", (True, None))
    allow_only(weights, "strategy", ("tensor", "channel", "block"))
    allow_only(weights, "dynamic", (False, None))
    allow_only(group, "output_activations", (None,))
    if inputs.get("dynamic"):
        allow_only(inputs, "strategy", ("token", "group", "tensor"))
        activations = Activations.TOKEN
    else:
        allow_only(inputs, "strategy", ("tensor",))
        activations = Activations.STATIC
    scales = {"tensor": Scales.TENSOR, "channel": Scales.ROW, "block": Scales.BLOCK}[weights["strategy"]]
    block = _block(weights.get("block_structure")) if scales is Scales.BLOCK else (128, 128)
    if scales is Scales.BLOCK:
        allow_only(inputs, "group_size", (None, block[1]))
    ignored = given.get("ignore") or []
    # compressed-tensors compares expressions with the beginning of a name
    patterns = [f"(?:{name[3:]}).*" if name.startswith("re:") else re.escape(name) for name in names_of(ignored)]
    return Fp8Format(scales, activations, any_of(patterns), block=block, precise_too=True)


_READERS = {"fp8": _read_fp8, "fbgemm_fp8": _read_fbgemm, "compressed-tensors": _read_compressed}


def _block(value: Any) -> tuple[int, int]:
    if isinstance(value, list) and len(value) == 2 and all(isinstance(n, int) and n > 0 and n % 16 == 0 for n in value):
        rows, columns = value
        if columns.bit_count() == 1 and max(value) <= _LARGEST_BLOCK:
            return rows, columns
    raise ConfigError(
        f"quantization_config: the size of blocks is {value!r:.80}; implemented: two multiples of 16 up to {_LARGEST_BLOCK}, "
        "the second of them a power of 2"
    )
