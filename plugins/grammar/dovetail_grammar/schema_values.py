"""Rewrite strings and numbers of a schema in the forms that xgrammar 0.2 enforces exactly."""

from __future__ import annotations

import math
from typing import Any

from dovetail_grammar.formats import FORMATS, UNSUPPORTED_FORMATS
from dovetail_grammar.patterns import bounded, emit, size, whole, without_escapes
from dovetail_grammar.regex_parser import Node, PatternError, parse
from dovetail_grammar.repeats import grouped
from dovetail_grammar.schema_rules import SchemaRefusal, unsupported

MAX_PATTERN = 3000
"""Maximum number of characters of a pattern with its repetitions written out; xgrammar's time grows with the square."""
MAX_INT = 2**63 - 1
MAX_ENUM = 1000
_COARSE = 1e9
"""From this magnitude on, the six decimals that xgrammar writes are finer than a double, so bounds are tightened to
integers."""


def text_pattern(pattern: str, path: str) -> Node:
    """Return a pattern of JSON Schema (which may match anywhere) as a pattern of whole strings without escapes. Raises
    ``SchemaRefusal``."""
    try:
        return without_escapes(whole(parse(pattern), search=True))
    except PatternError as error:
        raise SchemaRefusal(
            path, f"the pattern {pattern!r} is not supported by this grammar backend: {error}", "pattern"
        ) from error


def anchored(node: Node, path: str) -> str:
    """Return the pattern as text for xgrammar. Raises ``SchemaRefusal`` if it is too large."""
    if size(node) > MAX_PATTERN:
        raise SchemaRefusal(
            path, f"the pattern has {size(node)} characters with its repetitions; allowed: {MAX_PATTERN}", "pattern"
        )
    return f"^(?:{emit(grouped(node))})$"


def string(s: dict[str, Any], path: str) -> dict[str, Any] | None:
    """Return the rewritten schema of a string, or None if no string satisfies it."""
    low, high = s.get("minLength", 0), s.get("maxLength")
    if high is not None and low > high:
        return None
    name = s.get("format")
    if name in UNSUPPORTED_FORMATS:
        raise unsupported(path, "format", f"{name!r} cannot be checked; allowed: {', '.join(sorted(FORMATS))}")
    if name in FORMATS and "pattern" in s:
        raise unsupported(path, "pattern", f"it is combined with the format {name!r}")
    pattern = f"^(?:{FORMATS[name]})$" if name in FORMATS else s.get("pattern")
    if pattern is None:
        return {"type": "string", **{key: s[key] for key in ("minLength", "maxLength") if key in s}}
    try:
        node = bounded(text_pattern(pattern, f"{path}/pattern"), low, high)
    except PatternError as error:
        raise unsupported(path, "minLength" if high is None else "maxLength", str(error)) from error
    return None if node is None else {"type": "string", "pattern": anchored(node, f"{path}/pattern")}


def number(s: dict[str, Any], path: str) -> dict[str, Any] | None:
    """Return the rewritten schema of a number, fractional or not, or None if no number satisfies it."""
    if "multipleOf" in s:
        if s["multipleOf"] % 1 != 0:
            raise unsupported(path, "multipleOf", f"{s['multipleOf']} is not an integer")
        return integer(s, path)
    bounds: dict[str, Any] = {}
    for key, exclusive, sign in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
        given = [(sign * s[name], name == exclusive) for name in (key, exclusive) if name in s]
        if given:
            value, strict = max(given)
            if abs(value) >= _COARSE:
                value, strict = (math.floor(value) + 1 if strict else math.ceil(value)), False
            bounds[exclusive if strict else key] = sign * value
    if not _possible(bounds):
        return None
    return {"type": "number", **bounds}


def _possible(bounds: dict[str, Any]) -> bool:
    low = bounds.get("minimum", bounds.get("exclusiveMinimum", -math.inf))
    high = bounds.get("maximum", bounds.get("exclusiveMaximum", math.inf))
    closed = "minimum" in bounds and "maximum" in bounds
    return low < high or (low == high and closed)


def integer(s: dict[str, Any], path: str) -> dict[str, Any] | None:
    """Return the rewritten schema of an integer, or None if no integer satisfies it."""
    lows = [math.ceil(s["minimum"])] if "minimum" in s else []
    lows += [math.floor(s["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in s else []
    highs = [math.floor(s["maximum"])] if "maximum" in s else []
    highs += [math.ceil(s["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in s else []
    low, high = max(lows, default=None), min(highs, default=None)
    if low is not None and high is not None and low > high:
        return None
    step = _step(s, path)
    if step != 1:
        return _multiples(step, low, high, path)
    bounds = {} if low is None else {"minimum": max(low, -MAX_INT)}
    if high is not None:
        bounds["maximum"] = min(high, MAX_INT)
    return {"type": "integer", **bounds}


def _step(s: dict[str, Any], path: str) -> int:
    """Return the distance between adjacent integers that satisfy ``multipleOf``."""
    step = s.get("multipleOf", 1)
    if step <= 0:
        raise SchemaRefusal(f"{path}/multipleOf", f"'multipleOf' is {step}; allowed: numbers above 0")
    if step % 1 == 0:
        return int(step)
    if step > 1e-9 and (1 / step) % 1 == 0:
        return 1
    raise unsupported(path, "multipleOf", f"{step} is neither an integer nor 1 divided by an integer")


def _multiples(step: int, low: int | None, high: int | None, path: str) -> dict[str, Any] | None:
    if low is None and high is None and step <= 1024:
        return {"type": "integer", "multipleOf": step}
    if low is None or high is None or (high - low) // step > MAX_ENUM:
        raise unsupported(
            path,
            "multipleOf",
            f"it is {step}; allowed: up to 1024 without bounds, or up to {MAX_ENUM} values between two bounds",
        )
    values = list(range(-(-low // step) * step, high + 1, step))
    return {"enum": values} if values else None
