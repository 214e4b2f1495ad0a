"""Determine whether two schemas are disjoint: ``oneOf`` equals ``anyOf`` if no value satisfies two branches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from dovetail_grammar.merge import MAX_BRANCHES, Schema, same, types_of
from dovetail_grammar.schema_documents import SchemaDocument


def all_disjoint(document: SchemaDocument, branches: Sequence[Schema], path: str) -> bool:
    """Return true if it is certain that no value satisfies two of the branches."""
    pairs = len(branches) <= MAX_BRANCHES and combinations(branches, 2)
    return bool(pairs) and all(disjoint(document, a, b, path) for a, b in pairs)


def disjoint(document: SchemaDocument, a: Schema, b: Schema, path: str, depth: int = 0) -> bool:
    """Return true if it is certain that no value satisfies both schemas."""
    a, b = document.resolve(a, path), document.resolve(b, path)
    if isinstance(a, bool) or isinstance(b, bool) or depth > 8:
        return a is False or b is False
    for first, second in ((a, b), (b, a)):
        for key in ("anyOf", "oneOf"):
            if key in first and all(disjoint(document, branch, second, path, depth + 1) for branch in first[key]):
                return True
        if "enum" in first and not any(_may_be(value, second) for value in first["enum"]):
            return True
    return not types_of(a) & types_of(b) or _objects_disjoint(document, a, b, path, depth)


def _objects_disjoint(document: SchemaDocument, a: dict[str, Any], b: dict[str, Any], path: str, depth: int) -> bool:
    """Return true if both allow only objects, and no value satisfies both because of a property: both require it with
    disjoint schemas, or one requires it and the other forbids it."""
    if types_of(a) & types_of(b) != {"object"}:
        return False
    for first, second in ((a, b), (b, a)):
        for name in first.get("required", ()):
            mine, other = (_property(s, name) for s in (first, second))
            excludes = name in second.get("required", ()) and disjoint(document, mine, other, path, depth + 1)
            if excludes or other is False:
                return True
    return False


def type_name(value: Any) -> str:
    """Return the JSON Schema type of a JSON value. A float without a fractional part is an integer."""
    names = {bool: "boolean", type(None): "null", str: "string", list: "array", dict: "object", int: "integer"}
    return "integer" if isinstance(value, float) and value.is_integer() else names.get(type(value), "number")


def _may_be(value: Any, s: dict[str, Any]) -> bool:
    """Return false if it is certain that the value does not satisfy the schema."""
    if "enum" in s and not any(same(value, other) for other in s["enum"]):
        return False
    return type_name(value) in types_of(s)


def _property(s: dict[str, Any], name: str) -> Schema:
    """Return the schema of the property ``name``, or True if patterns of names leave it uncertain."""
    if name in s.get("properties", {}):
        return s["properties"][name]
    return True if s.get("patternProperties") else s.get("additionalProperties", True)
