"""Rewrite JSON Schemas without ``not``, ``if`` and overlapping ``oneOf``, with keywords that a grammar can express.

The negation of a schema is the union of the negations of its keywords: ``not: {required: [a, b]}`` is an object without
``a``, or one without ``b``. Every rewriting here is exact. Keywords without an exact rewriting ("there is an item that
...", "a key that ...") are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from dovetail_grammar.merge import Schema, types_of
from dovetail_grammar.patterns import avoid, emit

MAX_DEPTH = 12
MAX_ONE_OF = 12
_ALL = ("null", "boolean", "number", "string", "array", "object")
_OPPOSITE: dict[str, tuple[str, str, int]] = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
}
"""Maps a keyword to the type that it constrains, the keyword of the opposite bound, and the shift from the bound to
that one."""

_ALWAYS_TRUE = (
    *((key, value) for key in ("items", "additionalProperties", "propertyNames") for value in (True, {})),
    ("uniqueItems", False),
)

Resolve = Callable[[Schema], Schema]


class NegationError(ValueError):
    """Raised when the negation cannot be written as a schema; ``str`` of the error is the keyword that prevents it."""


def any_of(options: Sequence[Schema]) -> Schema:
    """Return a schema that allows what any of the options allows, in its simplest form."""
    left = [option for option in options if option is not False]
    if not left or True in left:
        return bool(left)
    return {"anyOf": left} if len(left) > 1 else left[0]


def negate(schema: Schema, resolve: Resolve, depth: int = 0) -> Schema:
    """Return the schema of all values that ``schema`` does not allow. ``resolve`` tidies a schema and replaces a schema
    that is only a reference by its target. Raises ``NegationError``."""
    if isinstance(schema, dict) and set(schema) == {"not"}:
        return schema["not"]
    if depth > MAX_DEPTH:
        raise NegationError("not")
    s = resolve(schema)
    if isinstance(s, bool):
        return not s
    below: Callable[[Schema], Schema] = lambda part: negate(part, resolve, depth + 1)  # noqa: E731
    return any_of([option for key in s for option in _of_keyword(key, s, below)])


def _of_keyword(key: str, s: dict[str, Any], below: Callable[[Schema], Schema]) -> list[Schema]:
    """Return schemas whose union is the negation of the keyword ``key``."""
    value = s[key]
    if key in _OPPOSITE:
        kind, opposite, shift = _OPPOSITE[key]
        return [{"type": kind, opposite: value + shift}] if value + shift >= 0 or kind == "number" else []
    if key in _NEGATIONS:
        return _NEGATIONS[key](value, below)
    if key == "patternProperties" and all(part in (True, {}) for part in value.values()):
        return []
    if (key, value) in _ALWAYS_TRUE:
        return []
    raise NegationError(key)


def _type(value: Any, below: Callable[[Schema], Schema]) -> list[Schema]:
    given = types_of({"type": value})
    if "integer" in given and "number" not in given:
        raise NegationError("type")
    others = [name for name in _ALL if name not in given]
    return [{"type": others}] if others else []


def _enum(value: list[Any], below: Callable[[Schema], Schema]) -> list[Schema]:
    """Return schemas of all values that are not in ``value``: values of other types, and other values of the same
    types.

    The complement of particular arrays or objects cannot be expressed, so these raise ``NegationError``.
    """
    if any(isinstance(item, list | dict) for item in value):
        raise NegationError("enum")
    flags = [item for item in value if isinstance(item, bool)]
    numbers = sorted({item for item in value if isinstance(item, int | float) and not isinstance(item, bool)})
    kinds = {type(item) for item in value} | ({int, float} if numbers else set())
    names = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string"}
    touched = {names[kind] for kind in kinds}
    options: list[Schema] = [{"type": [name for name in _ALL if name not in touched]}]
    options += [{"enum": [flag]} for flag in (True, False) if flags and flag not in flags]
    options += _between(numbers) if numbers else []
    strings = [item for item in value if isinstance(item, str)]
    if strings:
        options.append({"type": "string", "pattern": f"^(?:{emit(avoid(strings))})$"})
    return options


def _between(numbers: Sequence[float]) -> list[Schema]:
    lows: list[dict[str, Any]] = [{}, *({"exclusiveMinimum": number} for number in numbers)]
    highs: list[dict[str, Any]] = [*({"exclusiveMaximum": number} for number in numbers), {}]
    return [{"type": "number", **low, **high} for low, high in zip(lows, highs, strict=True)]


def _properties(value: dict[str, Schema], below: Callable[[Schema], Schema]) -> list[Schema]:
    wrong = {name: below(part) for name, part in value.items()}
    return [
        {"type": "object", "properties": {name: part}, "required": [name]}
        for name, part in wrong.items()
        if part is not False
    ]


def _required(value: list[str], below: Callable[[Schema], Schema]) -> list[Schema]:
    return [{"type": "object", "properties": {name: False}} for name in value]


def _prefix(value: list[Schema], below: Callable[[Schema], Schema]) -> list[Schema]:
    wrong = [below(part) for part in value]
    return [
        {"type": "array", "minItems": index + 1, "prefixItems": [*[True] * index, part]}
        for index, part in enumerate(wrong)
        if part is not False
    ]


def _one_of(value: list[Schema], below: Callable[[Schema], Schema]) -> list[Schema]:
    none: Schema = {"allOf": [below(part) for part in value]}
    return [none, *({"allOf": [a, b]} for a, b in combinations(value, 2))]


_NEGATIONS: dict[str, Callable[[Any, Callable[[Schema], Schema]], list[Schema]]] = {
    "type": _type,
    "enum": _enum,
    "properties": _properties,
    "required": _required,
    "prefixItems": _prefix,
    "allOf": lambda value, below: [below(part) for part in value],
    "anyOf": lambda value, below: [{"allOf": [below(part) for part in value]}],
    "oneOf": _one_of,
}


def without_not(s: dict[str, Any], resolve: Resolve) -> dict[str, Any]:
    """Return the schema with ``not`` and ``if`` written as ``allOf`` and ``anyOf``. Raises ``NegationError``."""
    more: list[Schema] = []
    rest = {key: value for key, value in s.items() if key not in ("not", "if", "then", "else")}
    if "not" in s:
        more.append(negate(s["not"], resolve))
    if "if" in s:
        more.append(_conditional(s["if"], s.get("then", True), s.get("else", True), resolve))
    return {**rest, "allOf": [*rest.get("allOf", ()), *more]} if more else rest


def _conditional(when: Schema, then: Schema, other: Schema, resolve: Resolve) -> Schema:
    if then is True and other is True:
        return True
    if other is True:
        return any_of([negate(when, resolve), then])
    if then is True:
        return any_of([when, other])
    return any_of([{"allOf": [when, then]}, {"allOf": [negate(when, resolve), other]}])


def exclusive(branches: Sequence[Schema], resolve: Resolve) -> Schema:
    """Return ``oneOf`` as an ``anyOf`` whose branches each exclude all others. Raises ``NegationError``."""
    if len(branches) > MAX_ONE_OF:
        raise NegationError("oneOf")
    against = [negate(branch, resolve) for branch in branches]
    return any_of([{"allOf": [branch, *against[:i], *against[i + 1 :]]} for i, branch in enumerate(branches)])
