"""Read rotary frequencies from a Hugging Face config. Does not use torch, so that a model can be described without it.

Kinds: ``default``; ``linear`` (position interpolation, Chen et al. 2023, arXiv 2306.15595); ``llama3`` (by wavelength,
as in Llama 3.1); ``yarn`` (Peng et al. 2023, arXiv 2309.00071).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dovetail.errors import ConfigError

Frequencies = np.ndarray[Any, np.dtype[np.float64]]


class RopeKind(enum.StrEnum):
    """Name how frequencies are stretched beyond the context for which the model was first trained."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Describe the rotary embedding of heads of ``head_dim``. Each field after ``factor`` belongs to one kind.

    ``original_len`` is the context before stretching, ``context_len`` after it. ``attention_factor`` multiplies cosines
    and sines (yarn).
    """

    head_dim: int
    theta: float
    original_len: int
    context_len: int
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def inverse_frequencies(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the radians per position of each pair, float32 ``[head_dim / 2]``."""
        plain = self.theta ** -(np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim)
        return _STRETCH[self.kind](plain, self).astype(np.float32)


def _llama3(plain: Frequencies, rope: RopeConfig) -> Frequencies:
    turns = rope.original_len * plain / (2 * math.pi)  # full rotations within the original context
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = np.clip(smooth, 0.0, 1.0)
    return plain * (kept + (1 - kept) / rope.factor)


def _yarn(plain: Frequencies, rope: RopeConfig) -> Frequencies:
    def pair_that_turns(turns: float) -> float:
        return rope.head_dim * math.log(rope.original_len / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.head_dim - 1)
    ramp = (np.arange(len(plain)) - low) / (high - low if high != low else 0.001)
    stretched = np.clip(ramp, 0.0, 1.0)
    return plain * (1 - stretched + stretched / rope.factor)


_STRETCH: dict[RopeKind, Callable[[Frequencies, RopeConfig], Frequencies]] = {
    RopeKind.DEFAULT: lambda plain, rope: plain,
    RopeKind.LINEAR: lambda plain, rope: plain / rope.factor,
    RopeKind.LLAMA3: _llama3,
    RopeKind.YARN: _yarn,
}

_KEYS: dict[RopeKind, frozenset[str]] = {
    RopeKind.DEFAULT: frozenset(),
    RopeKind.LINEAR: frozenset({"factor"}),
    RopeKind.LLAMA3: frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    RopeKind.YARN: frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}
_COMMON_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_REQUIRED: dict[RopeKind, tuple[str, ...]] = {
    RopeKind.DEFAULT: (),
    RopeKind.LINEAR: ("factor",),
    RopeKind.LLAMA3: ("factor", "low_freq_factor", "high_freq_factor"),
    RopeKind.YARN: ("factor",),
}


def read_rope(config: Mapping[str, Any], head_dim: int, max_positions: int) -> RopeConfig:
    """Return the rotary settings of a config.json, in the format of transformers 4 (``rope_theta`` and
    ``rope_scaling``) or 5 (``rope_parameters``). Raises ``ConfigError`` for a kind or a key that is not implemented."""
    section, given = _section(config)
    kind = _kind(section, given)
    unknown = set(given) - _KEYS[kind] - _COMMON_KEYS
    if unknown:
        raise ConfigError(
            f"config.json: {section} of type {kind} has {sorted(unknown)}; implemented: {sorted(_KEYS[kind])}"
        )
    for key in _REQUIRED[kind]:
        if given.get(key) is None:
            raise ConfigError(f"config.json: {section} of type {kind} needs {key!r}")
    _refuse_partial(section, {**config, **given})
    if head_dim % 2:
        raise ConfigError(f"config.json: head_dim is {head_dim}; rotary embedding needs an even one")
    theta = float(given.get("rope_theta") or config.get("rope_theta") or 10000.0)
    pretrained = "original_max_position_embeddings"
    original = int(config.get(pretrained) or given.get(pretrained) or max_positions)
    factor = float(given.get("factor") or 1.0)
    return RopeConfig(
        head_dim=head_dim,
        theta=theta,
        original_len=original,
        context_len=_context_len(kind, original, max_positions, factor),
        kind=kind,
        factor=factor,
        low_freq_factor=float(given.get("low_freq_factor") or 1.0),
        high_freq_factor=float(given.get("high_freq_factor") or 4.0),
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        truncate=bool(given.get("truncate", True)),
        attention_factor=_attention_factor(given, factor) if kind is RopeKind.YARN else 1.0,
    )


def _section(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    given = config.get(name) or {}
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise ConfigError(f"config.json: {name} is {given!r}; implemented: one set of settings for all layers")
    return name, given


def _kind(section: str, given: Mapping[str, Any]) -> RopeKind:
    name = given.get("rope_type") or given.get("type") or "default"
    if name not in list(RopeKind):
        raise ConfigError(
            f"config.json: {section} has type {name!r}; implemented: {', '.join(RopeKind)}. "
            "To run without stretching, within the original context, override it with null (model.overrides)"
        )
    return RopeKind(name)


def _refuse_partial(section: str, given: Mapping[str, Any]) -> None:
    part = given.get("partial_rotary_factor")
    if part is not None and part != 1:
        raise ConfigError(f"config.json: partial_rotary_factor ({section}) is {part!r}; implemented: 1.0")


def _context_len(kind: RopeKind, original: int, max_positions: int, factor: float) -> int:
    if kind is RopeKind.LINEAR:
        return int(max_positions * factor)
    return int(original * factor) if kind is RopeKind.YARN else max_positions


def _attention_factor(given: Mapping[str, Any], factor: float) -> float:
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    weight, weight_all = given.get("mscale"), given.get("mscale_all_dim")
    return temperature(weight) / temperature(weight_all) if weight and weight_all else temperature(1.0)
