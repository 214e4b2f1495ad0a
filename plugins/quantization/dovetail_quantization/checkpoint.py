"""Read what the ``quantization_config`` of checkpoints of all formats have in common. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from dovetail.interfaces.model import WeightTarget
    from dovetail.interfaces.quantization import LinearShape


def allow_only(given: Mapping[str, Any], key: str, allowed: Sequence[Any]) -> None:
    """Raise ``ConfigError`` if a setting of a ``quantization_config`` is none of those that are implemented, or of another
    type: 4.0 and True are not the integers that they equal."""
    value = given.get(key)
    if not any(type(value) is type(one) and value == one for one in allowed):
        shown = ", ".join("absent" if one is None else repr(one) for one in allowed)
        raise ConfigError(f"quantization_config: {key} is {value!r:.200}; implemented: {shown}")


def check_kv_scheme(given: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` if keys and values have other scales than static ones of FP8, which a KV store reads."""
    scheme = given.get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and scheme:
        fp8 = scheme.get("num_bits") == 8 and scheme.get("type") == "float" and not scheme.get("dynamic")
        known = fp8 and scheme.get("strategy", "tensor") in ("tensor", "attn_head")
    else:
        known = scheme in (None, {}, "static")
    if not known:
        raise ConfigError(
            f"quantization_config: kv_cache_scheme is {scheme!r:.200}; implemented: absent, 'static', 8 bits of type float with "
            "static scales (strategy tensor or attn_head)"
        )


def modules_left_out(given: Mapping[str, Any], *keys: str) -> re.Pattern[str]:
    """Return a pattern of the modules that transformers leaves out (``should_convert_module``). An entry is a regular
    expression of the beginning of a name, up to the end of one of its parts, or, read literally, the end of a name."""
    names = [name for key in keys for name in names_of(given.get(key) or [])]
    return any_of([rf"(?:{name})(?:(?<=\.)|(?=\.|$)).*|.*{re.escape(name)}" for name in names])


def names_of(value: Any) -> list[str]:
    """Return a list of modules that are not quantized. Raises ``ConfigError`` if ``value`` is no list of names."""
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return value
    raise ConfigError(
        f"quantization_config: the modules that are not quantized are {value!r:.200}; allowed: a list of names"
    )


def any_of(patterns: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern that matches what one of the regular expressions matches."""
    try:
        return re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or r"(?!)")
    except re.error as error:
        raise ConfigError(f"{list(patterns)!r:.200} has a wrong regular expression: {error}") from error


def refuse_ignore(ignore: Sequence[str]) -> None:
    """Raise ``ConfigError`` if the config names modules to leave out of a checkpoint that is quantized already."""
    if ignore:
        raise ConfigError(
            "quantization.ignore is set, and the checkpoint itself names the modules that are not quantized; leave it out"
        )


def refuse_unused(ignore: Sequence[str], names: Collection[str]) -> None:
    """Raise ``ConfigError`` if one of the regular expressions of ``quantization.ignore`` matches no module of ``names``."""
    for pattern in ignore:
        if not any(re.fullmatch(pattern, name) for name in names):
            raise ConfigError(
                f"quantization.ignore has {pattern!r}, which matches no module of the model; allowed: regular expressions of whole "
                f"names, such as {next(iter(names), '')!r}"
            )


def leaves_out(names: Sequence[str], ignored: re.Pattern[str]) -> bool:
    """Return True if ``ignored`` matches the modules of a layer, which is then not quantized. Raises ``ConfigError`` if it
    matches only some of them."""
    matching = [name for name in names if ignored.fullmatch(name)]
    if matching and len(matching) < len(names):
        others = [name for name in names if name not in set(matching)]
        raise ConfigError(
            f"the quantization leaves out {listed(matching)}, but not the other modules of the same layer ({listed(others)}); all of "
            "them or none can be quantized"
        )
    return bool(matching)


def module_index(shape: LinearShape, weight: WeightTarget) -> int:
    """Return the place of the module that ``weight`` is of among those of the layer of ``shape``."""
    starts = [sum(shape.rows[:index]) for index in range(len(shape.rows))]
    return starts.index(weight.start or 0)


def listed(names: Sequence[str]) -> str:
    """Return some of the names for an error message."""
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
