"""Classify the keywords of JSON Schema (2020-12, with the spellings of older drafts), and tidy or refuse them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.errors import GrammarError

ASSERTIONS: dict[str, tuple[str, ...]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "object": ("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties", "propertyNames"),
}  # fmt: skip
"""Keywords that constrain the values of one type and have no effect on other values."""

KNOWN = frozenset({"type", "enum", "allOf", "anyOf", "oneOf", "$ref"}.union(*ASSERTIONS.values()))
"""Keywords of a tidy schema. Every other keyword is an annotation, or was refused or rewritten."""

REFUSED = frozenset(
    {"not", "if", "contains", "$dynamicRef", "$recursiveRef", "unevaluatedProperties", "unevaluatedItems", "disallow", "extends"}
)  # fmt: skip
"""Keywords that change which values are valid and that no grammar here can express."""

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_LARGE = 1e300
_SHAPES: dict[str, type | tuple[type, ...]] = {
    "properties": dict,
    "patternProperties": dict,
    "required": list,
    "enum": list,
    "prefixItems": list,
    "allOf": list,
    "anyOf": list,
    "oneOf": list,
    "pattern": str,
    "format": str,
    "$ref": str,
    "type": (str, list),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), dict),
}


class SchemaRefusal(GrammarError):
    """Raised when a schema, or a part of one, is malformed or cannot be enforced."""

    def __init__(self, path: str, message: str, keyword: str | None = None) -> None:
        super().__init__(f"{message} (at {path} of the schema)", param="json_schema", keyword=keyword)

    @classmethod
    def not_a_schema(cls, value: object, path: str = "#") -> SchemaRefusal:
        """Return the refusal of a value that is not a schema."""
        return cls(path, f"a schema is an object or a boolean, not {value!r}")


def unsupported(path: str, keyword: str, why: str = "") -> SchemaRefusal:
    """Return the refusal of a keyword, with advice for the client."""
    reason = f": {why}" if why else ""
    return SchemaRefusal(
        f"{path}/{keyword}",
        f"the keyword {keyword!r} is not supported by this grammar backend here{reason}; remove it and check the answer yourself",
        keyword,
    )


def tidy(schema: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the keywords that decide validity, in the spelling of draft 2020-12, with well-formed values.
    Raises ``SchemaRefusal`` for keywords that cannot be enforced."""
    s = {key: value for key, value in schema.items() if key in KNOWN or key in _REWRITES or key in REFUSED}
    _check_shapes(s, path)
    for key, rewrite in _REWRITES.items():
        if key in s:
            rewrite(s, path)
    for key in REFUSED & s.keys():
        if key != "if" or {"then", "else"} & schema.keys():
            raise unsupported(path, key)
    s = {key: value for key, value in s.items() if key in KNOWN}
    _check_numbers(s, path)
    return s


def _check_shapes(s: dict[str, Any], path: str) -> None:
    for key, value in s.items():
        if key in _SHAPES and not isinstance(value, _SHAPES[key]):
            raise SchemaRefusal(f"{path}/{key}", f"{key!r} has the value {value!r}, which is of the wrong type")
    for key in ("anyOf", "oneOf", "allOf", "enum"):
        if key in s and not s[key]:
            raise SchemaRefusal(f"{path}/{key}", f"{key!r} is empty, so nothing is valid")


def _check_numbers(s: dict[str, Any], path: str) -> None:
    for key in s.keys() & {*ASSERTIONS["number"], *_COUNTS}:
        value = s[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGE < value < _LARGE:
            raise SchemaRefusal(f"{path}/{key}", f"{key!r} is {value!r}; allowed: numbers of reasonable size")
        if key in _COUNTS and (value < 0 or value % 1 != 0):
            raise SchemaRefusal(f"{path}/{key}", f"{key!r} is {value!r}; allowed: integers of at least 0")
        if key in _COUNTS:
            s[key] = int(value)


def _const(s: dict[str, Any], path: str) -> None:
    value = s.pop("const")
    if "enum" in s:
        s["allOf"] = [*s.get("allOf", []), {"enum": [value]}]
    else:
        s["enum"] = [value]


def _old_items(s: dict[str, Any], path: str) -> None:
    if isinstance(s["items"], list):
        s["prefixItems"] = s.pop("items")
        if "additionalItems" in s:
            s["items"] = s["additionalItems"]


def _old_bound(bound: str, exclusive: str) -> Any:
    def rewrite(s: dict[str, Any], path: str) -> None:
        if s[exclusive] is True and bound in s:
            s[exclusive] = s.pop(bound)
        elif isinstance(s[exclusive], bool):
            del s[exclusive]

    return rewrite


def _unevaluated(key: str, plain: str) -> Any:
    def rewrite(s: dict[str, Any], path: str) -> None:
        value = s.pop(key)
        if value is True or plain in s:
            return
        if {"allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas", "contains"} & s.keys():
            raise unsupported(
                path,
                key,
                "it is supported only in a schema without allOf, anyOf, oneOf, $ref, if, dependentSchemas and contains",
            )
        s[plain] = value

    return rewrite


def _dependent(key: str) -> Any:
    def rewrite(s: dict[str, Any], path: str) -> None:
        for name, then in s.pop(key).items():
            needs = {"required": [name, *then]} if isinstance(then, list) else {"allOf": [{"required": [name]}, then]}
            choice = {"anyOf": [{"properties": {name: False}}, needs]}
            s["allOf"] = [*s.get("allOf", []), choice]

    return rewrite


def _contains(s: dict[str, Any], path: str) -> None:
    if s.get("minContains") == 0 and "maxContains" not in s:
        del s["contains"]


def _drop(key: str) -> Any:
    def rewrite(s: dict[str, Any], path: str) -> None:
        del s[key]

    return rewrite


_REWRITES: dict[str, Any] = {
    "const": _const,
    "items": _old_items,
    "additionalItems": _drop("additionalItems"),
    "exclusiveMinimum": _old_bound("minimum", "exclusiveMinimum"),
    "exclusiveMaximum": _old_bound("maximum", "exclusiveMaximum"),
    "unevaluatedProperties": _unevaluated("unevaluatedProperties", "additionalProperties"),
    "unevaluatedItems": _unevaluated("unevaluatedItems", "items"),
    "dependentRequired": _dependent("dependentRequired"),
    "dependentSchemas": _dependent("dependentSchemas"),
    "dependencies": _dependent("dependencies"),
    "contains": _contains,
    "minContains": _drop("minContains"),
    "maxContains": _drop("maxContains"),
}

REWRITTEN = frozenset(_REWRITES)
"""Keywords that ``tidy`` replaces by others, or checks and drops."""
