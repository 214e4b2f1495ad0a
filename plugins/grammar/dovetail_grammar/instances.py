"""Determine whether a JSON value satisfies a schema, which filters the values of ``enum`` by the other keywords."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from dovetail_grammar.disjoint import type_name
from dovetail_grammar.formats import FORMATS
from dovetail_grammar.merge import Schema, same, types_of
from dovetail_grammar.patterns import emit, whole
from dovetail_grammar.regex_parser import PatternError, parse

Resolve = Callable[[Schema], Schema]
Check = Callable[[Any, dict[str, Any], Resolve], bool]


class UndecidedError(ValueError):
    """Raised when it cannot be decided; ``str`` of the error is the keyword that prevents it."""


def satisfies(value: Any, schema: Schema, resolve: Resolve) -> bool:
    """Return true if ``value`` satisfies ``schema``. ``resolve`` tidies a schema and replaces a schema that is only a
    reference by its target. Raises ``UndecidedError``."""
    s = resolve(schema)
    if isinstance(s, bool):
        return s
    for key in s:
        if key not in _CHECKS:
            raise UndecidedError(key)
    return all(_CHECKS[key](value, s, resolve) for key in s)


def matches(pattern: str, text: str) -> bool:
    """Return true if a pattern of JSON Schema matches the text. Raises ``UndecidedError``."""
    try:
        return re.fullmatch(emit(whole(parse(pattern), search=True)), text) is not None
    except PatternError as error:
        raise UndecidedError("pattern") from error


def _type(value: Any, s: dict[str, Any], resolve: Resolve) -> bool:
    return type_name(value) in types_of(s)


def _format(value: Any, s: dict[str, Any], resolve: Resolve) -> bool:
    name = s["format"]
    return not isinstance(value, str) or name not in FORMATS or matches(f"^(?:{FORMATS[name]})$", value)


def _text(key: str, check: Callable[[str, Any], bool]) -> Check:
    return lambda value, s, resolve: not isinstance(value, str) or check(value, s[key])


def _array(key: str, check: Callable[[list[Any], Any], bool]) -> Check:
    return lambda value, s, resolve: not isinstance(value, list) or check(value, s[key])


def _object(key: str, check: Callable[[dict[str, Any], Any], bool]) -> Check:
    return lambda value, s, resolve: not isinstance(value, dict) or check(value, s[key])


def _number(key: str, check: Callable[[Fraction, Fraction], bool]) -> Check:
    def checked(value: Any, s: dict[str, Any], resolve: Resolve) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return True
        return check(Fraction(str(value)), Fraction(str(s[key])))

    return checked


def _unique(value: list[Any], wanted: Any) -> bool:
    return wanted is not True or not any(same(a, b) for i, a in enumerate(value) for b in value[:i])


def _items(value: Any, s: dict[str, Any], resolve: Resolve) -> bool:
    if not isinstance(value, list):
        return True
    prefix = s.get("prefixItems", [])
    pairs = [(item, prefix[i] if i < len(prefix) else s.get("items", True)) for i, item in enumerate(value)]
    return all(satisfies(item, part, resolve) for item, part in pairs)


def _properties(value: Any, s: dict[str, Any], resolve: Resolve) -> bool:
    if not isinstance(value, dict):
        return True
    for name, item in value.items():
        parts = [s["properties"][name]] if name in s.get("properties", {}) else []
        parts += [part for pattern, part in s.get("patternProperties", {}).items() if matches(pattern, name)]
        if not all(satisfies(item, part, resolve) for part in parts or [s.get("additionalProperties", True)]):
            return False
    return True


def _names(value: Any, s: dict[str, Any], resolve: Resolve) -> bool:
    return not isinstance(value, dict) or all(satisfies(name, s["propertyNames"], resolve) for name in value)


def _branches(key: str, enough: Callable[[list[bool]], bool]) -> Check:
    return lambda value, s, resolve: enough([satisfies(value, branch, resolve) for branch in s[key]])


_CHECKS: dict[str, Check] = {
    "type": _type,
    "enum": lambda value, s, resolve: any(same(value, other) for other in s["enum"]),
    "format": _format,
    "minLength": _text("minLength", lambda text, bound: len(text) >= bound),
    "maxLength": _text("maxLength", lambda text, bound: len(text) <= bound),
    "pattern": _text("pattern", lambda text, pattern: matches(pattern, text)),
    "minimum": _number("minimum", lambda value, bound: value >= bound),
    "maximum": _number("maximum", lambda value, bound: value <= bound),
    "exclusiveMinimum": _number("exclusiveMinimum", lambda value, bound: value > bound),
    "exclusiveMaximum": _number("exclusiveMaximum", lambda value, bound: value < bound),
    "multipleOf": _number("multipleOf", lambda value, step: step > 0 and value % step == 0),
    "minItems": _array("minItems", lambda items, bound: len(items) >= bound),
    "maxItems": _array("maxItems", lambda items, bound: len(items) <= bound),
    "uniqueItems": _array("uniqueItems", _unique),
    "items": _items,
    "prefixItems": _items,
    "minProperties": _object("minProperties", lambda value, bound: len(value) >= bound),
    "maxProperties": _object("maxProperties", lambda value, bound: len(value) <= bound),
    "required": _object("required", lambda value, names: all(name in value for name in names)),
    "properties": _properties,
    "patternProperties": _properties,
    "additionalProperties": _properties,
    "propertyNames": _names,
    "allOf": _branches("allOf", all),
    "anyOf": _branches("anyOf", any),
    "oneOf": _branches("oneOf", lambda found: sum(found) == 1),
}
