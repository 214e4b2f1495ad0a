"""Read rotary frequencies from a Hugging Face config. Does not use torch, so that a model can be described without it.

Kinds: ``default``; ``linear`` (position interpolation, Chen et al. 2023, arXiv 2306.15595); ``llama3`` (by wavelength,
as in Llama 3.1); ``yarn`` (Peng et al. 2023, arXiv 2309.00071); ``longrope`` (Ding et al. 2024, arXiv 2402.13753).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
    LONGROPE = "longrope"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Describe the rotary embedding of heads of ``head_dim``. Each field after ``factor`` belongs to one kind.

    ``original_len`` is the context before stretching, ``context_len`` after it. ``attention_factor`` multiplies cosines
    and sines (yarn, longrope). If ``partial_dim`` is not 0, only the first ``partial_dim`` elements of a head are
    rotated.

    ``short_factors`` and ``long_factors`` (longrope) divide the frequencies, one factor for each. All requests are
    rotated with the same ones, because their keys are shared and kept: with the long ones if ``context_len`` is above
    ``original_len``. ``short_scale`` and ``long_scale`` are used like ``attention_factor`` with either.
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
    partial_dim: int = 0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    short_scale: float | None = None
    long_scale: float | None = None

    @property
    def rotary_dim(self) -> int:
        """Return the number of elements of a head that are rotated."""
        return self.partial_dim or self.head_dim

    def served(self, context_len: int) -> RopeConfig:
        """Return the settings for requests of at most ``context_len`` tokens, or of as many as before if these are
        fewer."""
        return replace(self, context_len=min(self.context_len, context_len))

    @property
    def scale(self) -> float:
        """Return what multiplies cosines and sines."""
        scale = self.long_scale if self.context_len > self.original_len else self.short_scale
        return self.attention_factor if scale is None else scale

    def inverse_frequencies(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the radians per position of each pair, float32 ``[rotary_dim / 2]``."""
        plain = self.theta ** -(np.arange(0, self.rotary_dim, 2, dtype=np.float64) / self.rotary_dim)
        return _STRETCH[self.kind](plain, self).astype(np.float32)


def _llama3(plain: Frequencies, rope: RopeConfig) -> Frequencies:
    turns = rope.original_len * plain / (2 * math.pi)  # full rotations within the original context
    span = rope.high_freq_factor - rope.low_freq_factor  # 0 in Llama 4: no frequency is between kept and stretched
    smooth = (turns - rope.low_freq_factor) / span if span else np.sign(turns - rope.low_freq_factor)
    kept = np.clip(smooth, 0.0, 1.0)
    return plain * (kept + (1 - kept) / rope.factor)


def _yarn(plain: Frequencies, rope: RopeConfig) -> Frequencies:
    def pair_that_turns(turns: float) -> float:
        return rope.rotary_dim * math.log(rope.original_len / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    ramp = (np.arange(len(plain)) - low) / (high - low if high != low else 0.001)
    stretched = np.clip(ramp, 0.0, 1.0)
    return plain * (1 - stretched + stretched / rope.factor)


def _longrope(plain: Frequencies, rope: RopeConfig) -> Frequencies:
    return plain / np.array(rope.long_factors if rope.context_len > rope.original_len else rope.short_factors)


_STRETCH: dict[RopeKind, Callable[[Frequencies, RopeConfig], Frequencies]] = {
    RopeKind.DEFAULT: lambda plain, rope: plain,
    RopeKind.LINEAR: lambda plain, rope: plain / rope.factor,
    RopeKind.LLAMA3: _llama3,
    RopeKind.YARN: _yarn,
    RopeKind.LONGROPE: _longrope,
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
    RopeKind.LONGROPE: frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "short_factor",
            "long_factor",
            "short_mscale",
            "long_mscale",
        }
    ),
}
_OLD_NAMES = {"su": "longrope"}
_COMMON_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_REQUIRED: dict[RopeKind, tuple[str, ...]] = {
    RopeKind.DEFAULT: (),
    RopeKind.LINEAR: ("factor",),
    RopeKind.LLAMA3: ("factor", "low_freq_factor", "high_freq_factor"),
    RopeKind.YARN: ("factor",),
    RopeKind.LONGROPE: ("short_factor", "long_factor"),
}


def read_rope(config: Mapping[str, Any], head_dim: int, max_positions: int, partial: float | None = None) -> RopeConfig:
    """Return the rotary settings of a config.json, in the format of transformers 4 (``rope_theta`` and
    ``rope_scaling``) or 5 (``rope_parameters``). ``partial`` is the part of a head that is rotated by default; if it is
    None, the model rotates whole heads only. Raises ``ConfigError`` for a kind or a key that is not implemented."""
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
    partial_dim = _partial_dim(section, {**config, **given}, head_dim, partial)
    if (partial_dim or head_dim) % 2 or head_dim % 2:
        raise ConfigError(
            f"config.json: head_dim is {head_dim}, of which {partial_dim or head_dim} elements are rotated; rotary embedding "
            "needs even numbers"
        )
    pretrained = "original_max_position_embeddings"
    original = int(_number("config", config, pretrained) or _number(section, given, pretrained) or max_positions)
    factor = _number(section, given, "factor") or 1.0
    rope = RopeConfig(
        head_dim=head_dim,
        theta=_number(section, given, "rope_theta") or _number("config", config, "rope_theta") or 10000.0,
        original_len=original,
        context_len=_context_len(kind, original, max_positions, factor),
        kind=kind,
        factor=factor,
        low_freq_factor=_number(section, given, "low_freq_factor") or 1.0,
        high_freq_factor=_number(section, given, "high_freq_factor") or 4.0,
        beta_fast=_number(section, given, "beta_fast") or 32.0,
        beta_slow=_number(section, given, "beta_slow") or 1.0,
        truncate=bool(given.get("truncate", True)),
        attention_factor=_attention_factor(section, given, factor) if kind is RopeKind.YARN else 1.0,
        partial_dim=partial_dim,
    )
    if kind is RopeKind.YARN and rope.theta <= 1:
        raise ConfigError(f"config.json: rope_theta is {rope.theta}; allowed with yarn: a number above 1")
    return _with_factors(rope, section, given, max_positions) if kind is RopeKind.LONGROPE else rope


def _refuse_contradiction(parameters: Any, scaling: Any) -> None:
    """Raise ``ConfigError`` if ``rope_scaling`` has settings that ``rope_parameters`` does not have."""
    if not isinstance(parameters, Mapping) or not isinstance(scaling, Mapping):
        return
    named = {"rope_type" if key == "type" else key: value for key, value in scaling.items()}
    theirs = {"rope_type": parameters.get("type"), **parameters}
    if any(theirs.get(key) != value for key, value in named.items()):
        raise ConfigError(
            f"config.json: rope_scaling is {dict(scaling)!r:.120}, and rope_parameters {dict(parameters)!r:.120}; allowed: one of "
            "them. Put all settings into rope_parameters (model.overrides can change it)"
        )


def _section(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    given = config.get(name) or {}
    if name == "rope_parameters":
        _refuse_contradiction(given, config.get("rope_scaling"))
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise ConfigError(f"config.json: {name} is {given!r}; implemented: one set of settings for all layers")
    return name, given


def _kind(section: str, given: Mapping[str, Any]) -> RopeKind:
    name = given.get("rope_type") or given.get("type") or "default"
    name = _OLD_NAMES.get(name, name) if isinstance(name, str) else name
    if not isinstance(name, str) or name not in list(RopeKind):
        raise ConfigError(
            f"config.json: {section} has type {name!r}; implemented: {', '.join(RopeKind)}. "
            "To run without stretching, within the original context, override it with null (model.overrides)"
        )
    return RopeKind(name)


def _number(section: str, given: Mapping[str, Any], key: str) -> float | None:
    """Return a number above 0, or None if it is null or absent."""
    value = given.get(key)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e300:
        raise ConfigError(f"config.json: {key} ({section}) is {value!r:.80}; allowed: a number above 0")
    return float(value)


def _partial_dim(section: str, given: Mapping[str, Any], head_dim: int, default: float | None) -> int:
    """Return ``RopeConfig.partial_dim``."""
    part = _number(section, given, "partial_rotary_factor") or default or 1.0
    if part > 1 or (part < 1 and default is None):
        allowed = "1.0" if default is None else "a number up to 1"
        raise ConfigError(f"config.json: partial_rotary_factor ({section}) is {part!r}; implemented: {allowed}")
    return int(head_dim * part) if part < 1 else 0


def _with_factors(rope: RopeConfig, section: str, given: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Return ``rope`` with its settings of longrope. As in transformers, and whatever the length of a request, the
    attention factor follows from ``factor`` or from the ratio of the contexts."""
    pairs = rope.rotary_dim // 2
    factors: dict[str, tuple[float, ...]] = {}
    for key in ("short_factor", "long_factor"):
        values = given[key]
        if not isinstance(values, list) or len(values) != pairs or not all(map(_is_positive, values)):
            raise ConfigError(
                f"config.json: {key} ({section}) is {values!r}; needed: a list of {pairs} numbers above 0"
            )
        factors[key] = tuple(float(value) for value in values)
    ratio = _number(section, given, "factor") or max_positions / rope.original_len
    default = math.sqrt(1 + math.log(ratio) / math.log(rope.original_len)) if ratio > 1 else 1.0
    return replace(
        rope,
        factor=ratio,
        attention_factor=_number(section, given, "attention_factor") or default,
        short_factors=factors["short_factor"],
        long_factors=factors["long_factor"],
        short_scale=_number(section, given, "short_mscale"),
        long_scale=_number(section, given, "long_mscale"),
    )


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _context_len(kind: RopeKind, original: int, max_positions: int, factor: float) -> int:
    if kind is RopeKind.LINEAR:
        return int(max_positions * factor)
    return int(original * factor) if kind is RopeKind.YARN else max_positions


def _attention_factor(section: str, given: Mapping[str, Any], factor: float) -> float:
    if (own := _number(section, given, "attention_factor")) is not None:
        return own

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    weight, weight_all = (_number(section, given, key) if given.get(key) else 0 for key in ("mscale", "mscale_all_dim"))
    return temperature(weight) / temperature(weight_all) if weight and weight_all else temperature(1.0)
