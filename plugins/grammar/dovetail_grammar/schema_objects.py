"""Rewrite arrays and objects of a schema in the forms that xgrammar 0.2 enforces exactly."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dovetail_grammar.merge import Schema
from dovetail_grammar.patterns import avoid, avoid_by_head, emit, first, size, whole, without_escapes
from dovetail_grammar.regex_parser import EVERY, JSON_ESCAPED, Chars, Node, Repeat, parse
from dovetail_grammar.schema_rules import SchemaRefusal, unsupported
from dovetail_grammar.schema_values import MAX_PATTERN, anchored, text_pattern

MAX_FREE_KEYS = 20_000
"""Maximum number of characters of the pattern for keys that the schema does not name, before it is split."""
MAX_COPIED = 200
"""Maximum number of characters of the schema of keys without a name that may be copied for every part of a split
pattern."""
Convert = Callable[[Schema, str], dict[str, Any] | None]


def array(s: dict[str, Any], path: str, convert: Convert, strict: bool) -> dict[str, Any] | None:
    """Return the rewritten schema of an array, or None if no array satisfies it."""
    low, high = s.get("minItems", 0), s.get("maxItems")
    if s.get("uniqueItems") is True and (high is None or high > 1):
        raise unsupported(path, "uniqueItems")
    prefix = [convert(item, f"{path}/prefixItems/{i}") for i, item in enumerate(s.get("prefixItems", [])[:high])]
    more = convert(s.get("items", not (strict and "prefixItems" in s)), f"{path}/items")
    if None in prefix:
        prefix, more = prefix[: prefix.index(None)], None
    longest = len(prefix) if more is None else high
    high = longest if high is None or (longest is not None and longest < high) else high
    if high is not None and low > high:
        return None
    if high == 0:
        return {"type": "array", "maxItems": 0}
    if high == len(prefix):
        more, high = None, None
    sizes = {"minItems": low} if low else {}
    sizes |= {} if high is None else {"maxItems": high}
    items = {"prefixItems": prefix} if prefix else {}
    return {"type": "array", **items, "items": False if more is None else more, **sizes}


def object_(s: dict[str, Any], path: str, convert: Convert, strict: bool) -> dict[str, Any] | None:
    """Return the rewritten schema of an object, or None if no object satisfies it."""
    required = dict.fromkeys(s.get("required", ()))
    patterns = [(text, value, _key(text, path)) for text, value in s.get("patternProperties", {}).items()]
    rest = s.get("additionalProperties", not (strict and "properties" in s))
    named = _named(s, required, patterns, rest, path)
    names = _key_rule(s, patterns, path, convert)
    if names is not None:
        named = {name: value if names.allows(name) else False for name, value in named.items()}
        named.update({name: rest for name in names.only or () if name not in named})
    values = {name: convert(value, f"{path}/properties/{name}") for name, value in named.items()}
    if any(values[name] is None for name in required):
        return None
    keys = _other_keys(named, patterns, rest, names, path, convert)
    properties = {name: value for name, value in values.items() if value is not None}
    sizes = _sizes(s, len(required), len(properties), bool(keys), path)
    if sizes is None:
        return None
    return {
        "type": "object",
        "properties": properties,
        **({"required": list(required)} if required else {}),
        **({"additionalProperties": False} | keys),
        **sizes,
    }


def _key(pattern: str, path: str) -> tuple[Node, re.Pattern[str]]:
    """Return a pattern of keys for the grammar, and as a regex that tests the names that the schema declares."""
    at = f"{path}/patternProperties/{pattern}"
    return text_pattern(pattern, at), re.compile(emit(whole(parse(pattern), search=True)))


def _named(
    s: dict[str, Any], required: dict[str, None], patterns: list[Any], rest: Schema, path: str
) -> dict[str, Schema]:
    """Return the schema of every key that the schema names: declared keys, and keys that are required but not declared."""
    named: dict[str, Schema] = dict(s.get("properties", {}))
    for name in required:
        if not isinstance(name, str):
            raise SchemaRefusal(f"{path}/required", f"'required' contains {name!r}; allowed: property names")
        if name not in named:
            named[name] = next((value for _, value, (_, key) in patterns if key.fullmatch(name)), rest)
    for name in named:
        for text, _, (_, key) in patterns:
            if key.fullmatch(name):
                raise unsupported(path, "patternProperties", f"{text!r} matches {name!r}, which is a property too")
    return named


def _other_keys(
    named: dict[str, Schema], patterns: list[Any], rest: Schema, names: _KeyRule | None, path: str, convert: Convert
) -> dict[str, Any]:
    """Return the keywords for keys that the schema does not name; empty if there can be none.

    These keys are written as ``patternProperties``, whose keys xgrammar writes without escapes, so that no key can
    spell a declared name in another way. If the schema itself has patterns, only keys that match one of them are
    generated.
    """
    if patterns:
        return _pattern_keys(patterns, path, convert)
    value = None if names and names.only is not None else convert(rest, f"{path}/additionalProperties")
    if value is None:
        return {}
    if names is not None:
        if named:
            raise unsupported(
                path,
                "propertyNames",
                "it is combined with properties, and keys that the schema does not name are allowed",
            )
        return {"patternProperties": {names.pattern: value}}
    if not named:
        return {"additionalProperties": value or True}
    plain = [name for name in named if not any(low <= ord(c) <= high for c in name for low, high in JSON_ESCAPED)]
    return {"patternProperties": _free_keys(plain, value, f"{path}/properties")}


def _free_keys(taken: list[str], value: dict[str, Any], path: str) -> dict[str, Any]:
    """Return patterns of all keys without escapes except ``taken``, each with the schema ``value``.

    xgrammar's time grows with the square of the length of a pattern, so a long pattern is split by the first character
    of the key.
    """
    whole_pattern = without_escapes(avoid(taken))
    if size(whole_pattern) <= MAX_PATTERN or len(json.dumps(value)) > MAX_COPIED:
        return {anchored(whole_pattern, path): value}
    if size(whole_pattern) > MAX_FREE_KEYS:
        raise unsupported(path, "properties", f"it names {len(taken)} keys, and other keys are allowed too")
    return {anchored(without_escapes(part), path): value for part in avoid_by_head(taken)}


def _pattern_keys(patterns: list[Any], path: str, convert: Convert) -> dict[str, Any]:
    values = {text: convert(value, f"{path}/patternProperties/{text}") for text, value, _ in patterns}
    nodes = {text: node for text, _, (node, _) in patterns}
    for j, b in enumerate(nodes):
        for a in list(nodes)[:j]:
            if _overlap(nodes[a], nodes[b]):
                raise unsupported(path, "patternProperties", f"{a!r} and {b!r} may match the same key")
    left = {anchored(nodes[text], path): value for text, value in values.items() if value is not None}
    return {"patternProperties": left} if left else {}


def _overlap(a: Node, b: Node) -> bool:
    return any(low <= top and bottom <= high for low, high in first(a) for bottom, top in first(b))


@dataclass(frozen=True, slots=True)
class _KeyRule:
    """Hold the rule of ``propertyNames``: a pattern of keys, or the ``only`` keys that are allowed."""

    pattern: str
    only: tuple[str, ...] | None = None

    def allows(self, name: str) -> bool:
        return bool(re.search(self.pattern, name)) if self.only is None else name in self.only


def _key_rule(s: dict[str, Any], patterns: list[Any], path: str, convert: Convert) -> _KeyRule | None:
    if s.get("propertyNames", True) is True:
        return None
    if patterns:
        raise unsupported(path, "propertyNames", "it is combined with 'patternProperties'")
    names = convert({"allOf": [s["propertyNames"], {"type": "string"}]}, f"{path}/propertyNames")
    if names is None or "enum" in names:
        return _KeyRule("", () if names is None else tuple(names["enum"]))
    if names.get("type") != "string":
        raise unsupported(path, "propertyNames", "it is not a simple schema of strings")
    every = Repeat(Chars(EVERY), names.get("minLength", 0), names.get("maxLength"))
    return _KeyRule(names.get("pattern") or anchored(without_escapes(every), f"{path}/propertyNames"))


def _sizes(s: dict[str, Any], required: int, declared: int, more: bool, path: str) -> dict[str, Any] | None:
    """Return the counts of properties that are left to enforce, or None if no count is possible.

    A key that the schema does not name can occur several times in the text and then counts once. Therefore a minimum
    above one can only be enforced with required names.
    """
    low, high = s.get("minProperties", 0), s.get("maxProperties")
    if high is not None and (high < required or low > high):
        return None
    if not more and low > declared:
        return None
    if more and low > max(required, 1):
        raise unsupported(path, "minProperties", f"it is {low}, and {required} properties are required")
    sizes = {"minProperties": low} if low > required else {}
    if high is not None and (more or high < declared):
        sizes["maxProperties"] = high
    return sizes
