"""Prepare JSON Schemas for llguidance. It resolves references into the document, so every subschema stays where it is.

llguidance refuses keywords that it knows but does not support, and ignores keywords that it does not know. This module
handles the rest: spellings of older drafts, patterns as ECMA defines them, formats, counts of keys that may repeat, and
numbers that lose digits in a double.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from dovetail_grammar.disjoint import all_disjoint
from dovetail_grammar.formats import FORMATS, UNSUPPORTED_FORMATS
from dovetail_grammar.merge import TYPES, Schema
from dovetail_grammar.patterns import emit, size, whole
from dovetail_grammar.regex_parser import PatternError, parse
from dovetail_grammar.schema_documents import SchemaDocument
from dovetail_grammar.schema_rules import KNOWN, REFUSED, REWRITTEN, SchemaRefusal, unsupported

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_ONE = ("items", "additionalProperties", "propertyNames")
_DECIDING = KNOWN | REFUSED | REWRITTEN | {"then", "else", "x-guidance"}
"""Keywords that ``tidy`` handles, and options for llguidance. All other keywords are annotations, or contain the
targets of references."""
_NATIVE = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
_EXACT = 2**53
_MAX_INT = 2**63 - 1
MAX_PATTERN = 20_000
MAX_DEPTH = 100


ESCAPES = 'nrbtf\\"'
"""Letters of the escape sequences in JSON strings."""


def prepare(schema: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Change the schema in place for llguidance, and return it with ``options`` for llguidance. Raises
    ``GrammarError``.

    If some keys have rules by name and other keys are free, strings have no ``\\u`` escapes, because a free key could
    spell a name with them.
    """
    if schema is False:
        raise SchemaRefusal("#", "the schema allows nothing, so no answer can satisfy it")
    if schema is not True and not isinstance(schema, dict):
        raise SchemaRefusal.not_a_schema(schema)
    document: dict[str, Any] = {} if schema is True else schema
    try:
        preparer = _Preparer(document)
        preparer.root(document)
    except RecursionError as error:
        raise SchemaRefusal("#", f"the schema is nested too deeply; allowed: {MAX_DEPTH} levels", "nesting") from error
    free = not preparer.names_are_ambiguous
    escapes = {"json_allowed_escapes": ESCAPES + "u" * free, "json_allow_general_unicode_escapes": free}
    return {**document, "x-guidance": {**options, **escapes}}


class _Preparer:
    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self.names = SchemaDocument(document)
        self.done: set[int] = set()
        self.pointers: list[tuple[str, str]] = []
        self.names_are_ambiguous = False

    def root(self, schema: dict[str, Any]) -> None:
        """Prepare the document and everything that its references reach."""
        self.visit(schema, "#", 0)
        while self.pointers:
            self.follow(*self.pointers.pop())

    def follow(self, pointer: str, path: str) -> None:
        """Prepare the target of a reference, wherever it is in the document."""
        value: Any = self.document
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            try:
                value = value[int(key)] if isinstance(value, list) else value[key]
            except (KeyError, IndexError, ValueError, TypeError) as error:
                found = "$ref" if self.names.scoped else None
                raise SchemaRefusal(path, f"the reference '#{pointer}' points to nothing", found) from error
        self.visit(value, path, 0)

    def visit(self, schema: Any, path: str, depth: int) -> None:
        """Rewrite a schema in place, once."""
        if isinstance(schema, bool) or id(schema) in self.done:
            return
        if not isinstance(schema, dict):
            raise SchemaRefusal.not_a_schema(schema, path)
        if depth > MAX_DEPTH:
            raise SchemaRefusal(path, f"the schema is nested more than {MAX_DEPTH} deep", "nesting")
        self.done.add(id(schema))
        tidied = self.names.tidied(schema, path)
        kept = {key: value for key, value in schema.items() if key not in _DECIDING}
        order = [key for key in schema if key in tidied]
        self.rewrite(tidied, path)
        schema.clear()
        schema.update({**kept, **{key: tidied[key] for key in order if key in tidied}, **tidied})
        self.descend(schema, path, depth + 1)

    def descend(self, schema: dict[str, Any], path: str, depth: int) -> None:
        """Visit all subschemas of ``schema``."""
        for key in _MAPS:
            values = schema.get(key, {})
            for name in values if isinstance(values, dict) else ():
                self.visit(values[name], f"{path}/{key}/{name}", depth)
        for key in _LISTS:
            for index, value in enumerate(schema.get(key, ())):
                self.visit(value, f"{path}/{key}/{index}", depth)
        for key in _ONE:
            if key in schema:
                self.visit(schema[key], f"{path}/{key}", depth)

    def rewrite(self, s: dict[str, Any], path: str) -> None:
        """Rewrite the keywords of one tidy schema in place."""
        _types(s, path)
        self.one_of(s, path)
        _patterns(s, path)
        _format(s, path)
        _numbers(s, path)
        _property_names(s, path)
        _counts(s, path)
        named = bool(s.keys() & {"properties", "patternProperties", "required"})
        self.names_are_ambiguous |= named and s.get("additionalProperties") is not False
        if "$ref" in s:
            self.reference(s["$ref"], path)
        if s.pop("uniqueItems", False) is True and s.get("maxItems", 2) > 1:
            raise unsupported(path, "uniqueItems")

    def one_of(self, s: dict[str, Any], path: str) -> None:
        """Replace ``oneOf`` by ``anyOf`` if that is equivalent. Otherwise leave ``oneOf`` for llguidance to accept or
        refuse."""
        branches = s.get("oneOf")
        if branches is None:
            return
        try:
            plain = {"anyOf": branches}
            whole = plain if all_disjoint(self.names, branches, path) else self.names.exclusive(branches, path)
        except SchemaRefusal:
            return
        del s["oneOf"]
        s["allOf"] = [*s.get("allOf", ()), whole]

    def reference(self, ref: str, path: str) -> None:
        """Record the target of ``ref`` if it is a pointer into the document."""
        base, _, fragment = ref.partition("#")
        if base and fragment.startswith("/") and not fragment.startswith(("/$defs/", "/definitions/")):
            raise unsupported(path, "$ref", f"{ref!r} points into another document")
        if not base and (fragment.startswith("/") or not fragment):
            self.pointers.append((unquote(fragment), path))


def _types(s: dict[str, Any], path: str) -> None:
    given = s.get("type", [])
    unknown = [name for name in ([given] if isinstance(given, str) else given) if name not in TYPES]
    if unknown:
        raise SchemaRefusal(f"{path}/type", f"'type' has {unknown[0]!r}; allowed: {', '.join(TYPES)}")
    if not all(isinstance(name, str) for name in s.get("required", ())):
        raise SchemaRefusal(f"{path}/required", "'required' contains something other than property names")


def pattern(text: str, path: str) -> str:
    """Return a pattern of JSON Schema in its simplest spelling, as a pattern of the whole text. Raises
    ``SchemaRefusal``."""
    try:
        node = whole(parse(text), search=True)
    except PatternError as error:
        raise SchemaRefusal(
            path, f"the pattern {text!r} is not supported by grammar backend llguidance: {error}", "pattern"
        ) from error
    if size(node) > MAX_PATTERN:
        raise SchemaRefusal(
            path, f"the pattern has {size(node)} characters with its repetitions; allowed: {MAX_PATTERN}", "pattern"
        )
    return f"^(?:{emit(node)})$"


def _patterns(s: dict[str, Any], path: str) -> None:
    if "pattern" in s:
        s["pattern"] = pattern(s["pattern"], f"{path}/pattern")
    if "patternProperties" in s:
        plain: dict[str, Any] = {}
        for text, value in s["patternProperties"].items():
            key = pattern(text, f"{path}/patternProperties/{text}")
            plain[key] = {"allOf": [plain[key], value]} if key in plain else value
        s["patternProperties"] = plain


def _format(s: dict[str, Any], path: str) -> None:
    name = s.get("format")
    if name in UNSUPPORTED_FORMATS:
        raise unsupported(path, "format", f"{name!r} cannot be checked; allowed: {', '.join(sorted(FORMATS))}")
    if name is None or name in _NATIVE:
        return
    del s["format"]
    if name in FORMATS:
        s["allOf"] = [*s.get("allOf", ()), {"pattern": f"^(?:{FORMATS[name]})$"}]


def _numbers(s: dict[str, Any], path: str) -> None:
    """Narrow or refuse bounds that llguidance would change, because it keeps them in doubles and 64-bit integers."""
    for key in s.keys() & {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}:
        value = s[key]
        if abs(value) < _EXACT:
            continue
        outward = value >= _MAX_INT if key == "maximum" else value <= -_MAX_INT if key == "minimum" else False
        if not outward or _may_be_fractional(s):
            raise unsupported(path, key, f"{value} has more digits than a double holds exactly")
        s[key] = math.copysign(2**63, value)
    if "multipleOf" in s and (s["multipleOf"] <= 0 or s["multipleOf"] < 1e-9 or s["multipleOf"] > 2**31):
        if s["multipleOf"] <= 0:
            raise SchemaRefusal(f"{path}/multipleOf", f"'multipleOf' is {s['multipleOf']}; allowed: numbers above 0")
        raise unsupported(path, "multipleOf", f"{s['multipleOf']} is too large or too small")


def _may_be_fractional(s: dict[str, Any]) -> bool:
    given = s.get("type", "number")
    return "number" in ([given] if isinstance(given, str) else given)


def _property_names(s: dict[str, Any], path: str) -> None:
    """Rewrite ``propertyNames`` as ``patternProperties``. Only a pattern is supported, on objects without other rules
    for keys."""
    names: Schema = s.pop("propertyNames", True)
    if names is True or names == {}:
        return
    rule: dict[str, Any] = names if isinstance(names, dict) else {}
    plain = set(rule) - {"type", "description", "title"} == {"pattern"} and rule.get("type", "string") == "string"
    if not plain or s.keys() & {"properties", "patternProperties", "required"}:
        raise unsupported(
            path, "propertyNames", "only a pattern is supported, on objects that do not declare or require properties"
        )
    text = pattern(rule["pattern"], f"{path}/propertyNames")
    s["patternProperties"] = {text: s.get("additionalProperties", True)}
    s["additionalProperties"] = False


def _counts(s: dict[str, Any], path: str) -> None:
    """Drop or refuse counts of keys. A key that the schema does not name may occur twice in the text, and then counts
    once."""
    closed = s.get("additionalProperties") is False and not s.get("patternProperties")
    if closed and s.get("maxProperties", -1) >= len(s.get("properties", {})):
        del s["maxProperties"]
    needed = len(set(s.get("required", ())))
    if not closed and s.get("minProperties", 0) > max(needed, 1):
        raise unsupported(path, "minProperties", f"it is {s['minProperties']}, and {needed} properties are required")
