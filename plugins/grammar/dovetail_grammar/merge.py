"""Merge two JSON schemas into one that allows what both allow, without ``allOf``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any] | bool
Resolve = Callable[[Schema], Schema]

MAX_BRANCHES = 64
TYPES = ("null", "boolean", "number", "string", "array", "object", "integer")
_OBJECT = ("properties", "patternProperties", "additionalProperties")
_ARRAY = ("prefixItems", "items")
_SMALLEST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_LARGEST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")


class MergeError(ValueError):
    """Raised when two schemas cannot be merged; ``keyword`` is the keyword that prevents it."""

    def __init__(self, keyword: str, why: str) -> None:
        super().__init__(f"{keyword!r} {why}")
        self.keyword = keyword


def same(a: Any, b: Any) -> bool:
    """Return true if two JSON values are equal: 1 equals 1.0, and true does not equal 1."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return (type(a) is type(b) or (_number(a) and _number(b))) and a == b


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def merge(a: Schema, b: Schema, resolve: Resolve) -> Schema:
    """Return the schema of what ``a`` and ``b`` both allow. ``resolve`` tidies a schema and replaces a reference by its
    target. Raises ``MergeError``."""
    a, b = resolve(a), resolve(b)
    if isinstance(a, bool) or isinstance(b, bool):
        return False if a is False or b is False else (b if a is True else a)
    merged = {key: value for key, value in {**a, **b}.items() if key not in _OBJECT + _ARRAY}
    for key in a.keys() & b.keys() - {*_OBJECT, *_ARRAY}:
        if not same(a[key], b[key]):
            merged[key] = _both(key, a[key], b[key], resolve)
    return {**merged, **_objects(a, b, resolve), **_arrays(a, b, resolve)}


def _both(key: str, a: Any, b: Any, resolve: Resolve) -> Any:
    """Return the value of a keyword that is as strict as both values ``a`` and ``b``."""
    if key in _SMALLEST:
        return min(a, b)
    if key in _LARGEST:
        return max(a, b)
    if key == "required":
        return [*a, *(name for name in b if name not in a)]
    if key == "type":
        return _common_types(a, b)
    if key == "enum":
        return [value for value in a if any(same(value, other) for other in b)]
    if key == "uniqueItems":
        return True
    if key == "propertyNames":
        return merge(a, b, resolve)
    if key == "multipleOf" and {type(a), type(b)} == {int}:
        return math.lcm(a, b)
    if key == "allOf":
        return [*a, *b]
    if key in ("anyOf", "oneOf") and len(a) * len(b) <= MAX_BRANCHES:
        return [merge(x, y, resolve) for x in a for y in b]
    raise MergeError(key, "is given twice with different values")


def types_of(s: dict[str, Any]) -> set[str]:
    """Return the types that a tidy schema allows: all types if it names none. ``number`` includes ``integer``."""
    given: Any = s.get("type", TYPES)
    names: set[str] = {given} if isinstance(given, str) else set(map(str, given))
    return names | ({"integer"} if "number" in names else set())


def _common_types(a: Any, b: Any) -> list[str]:
    common = types_of({"type": a}) & types_of({"type": b})
    return sorted(common - ({"integer"} if "number" in common else set()))


def _objects(a: dict[str, Any], b: dict[str, Any], resolve: Resolve) -> dict[str, Any]:
    first, second = ({key: s[key] for key in _OBJECT if key in s} for s in (a, b))
    if not first or not second or first == second:
        return first or second
    if "patternProperties" in first or "patternProperties" in second:
        raise MergeError("patternProperties", "is combined with object keywords of another subschema")
    names = dict.fromkeys([*first.get("properties", {}), *second.get("properties", {})])
    rest = [s.get("additionalProperties", True) for s in (first, second)]
    values = {
        name: merge(
            first.get("properties", {}).get(name, rest[0]), second.get("properties", {}).get(name, rest[1]), resolve
        )
        for name in names
    }
    additional = merge(rest[0], rest[1], resolve)
    return {"properties": values, **({} if additional is True else {"additionalProperties": additional})}


def _arrays(a: dict[str, Any], b: dict[str, Any], resolve: Resolve) -> dict[str, Any]:
    first, second = ({key: s[key] for key in _ARRAY if key in s} for s in (a, b))
    if not first or not second or first == second:
        return first or second
    pairs = [(list(s.get("prefixItems", [])), s.get("items", True)) for s in (first, second)]
    length = max(len(prefix) for prefix, _ in pairs)
    (left, left_rest), (right, right_rest) = [(p + [rest] * (length - len(p)), rest) for p, rest in pairs]
    merged: dict[str, Any] = {"items": merge(left_rest, right_rest, resolve)}
    if length:
        merged["prefixItems"] = [merge(x, y, resolve) for x, y in zip(left, right, strict=True)]
    return merged
