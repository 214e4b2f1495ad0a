"""Rewrite JSON Schemas into the subset that xgrammar enforces exactly, or refuse them.

xgrammar ignores keywords that it has no grammar for, siblings of ``anyOf`` and ``$ref``, all but one member of
``allOf``, and more, with a warning at most. A rewritten schema means the same as the original, or it is narrower (a
fixed order of properties, keys and bounded strings without escapes). It is never wider, so every generated text is
valid. A schema that cannot be rewritten in this way is refused, with the keyword and its path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dovetail_grammar import schema_objects, schema_values
from dovetail_grammar.disjoint import all_disjoint
from dovetail_grammar.formats import FORMATS
from dovetail_grammar.instances import UndecidedError, satisfies
from dovetail_grammar.merge import TYPES, MergeError, Schema, merge, types_of
from dovetail_grammar.schema_documents import SchemaDocument
from dovetail_grammar.schema_rules import SchemaRefusal, unsupported

MAX_DEPTH = 64
Converted = dict[str, Any] | None
"""Type of a rewritten schema; None allows nothing."""


def rewrite(schema: Schema, *, strict: bool = False, free_text: bool = False) -> dict[str, Any]:
    """Return the schema for xgrammar (with ``strict_mode=False``). Raises ``GrammarError``.

    ``strict`` closes objects that name properties and arrays that name items if the schema leaves them open. With
    ``free_text``, where control characters are allowed around the JSON text, bounds of lengths become patterns, because
    xgrammar allows control characters in strings with such bounds.
    """
    try:
        writer = _Writer(SchemaDocument(SchemaDocument.checked(schema, "#")), strict, free_text)
        converted = writer.convert(schema, "#", 0)
    except RecursionError as error:
        raise SchemaRefusal(
            "#", f"the schema is nested too deeply; allowed: about {MAX_DEPTH} levels", "nesting"
        ) from error
    if converted is None:
        raise SchemaRefusal("#", "the schema allows nothing, so no answer can satisfy it")
    return {**converted, "$defs": writer.defs} if writer.defs else converted


class _Writer:
    def __init__(self, document: SchemaDocument, strict: bool, free_text: bool) -> None:
        self.document = document
        self.strict = strict
        self.free_text = free_text
        self.defs: dict[str, Converted] = {}
        self.names: dict[str, str] = {}

    def convert(self, schema: Schema, path: str, depth: int) -> Converted:
        """Return the rewritten form of any schema. ``path`` is its position in the document, for messages."""
        if depth > MAX_DEPTH:
            raise SchemaRefusal(path, f"the schema is nested more than {MAX_DEPTH} deep", "nesting")
        if isinstance(self.document.checked(schema, path), bool):
            return {} if schema else None
        assert isinstance(schema, dict)
        s = self.document.tidied(schema, path)
        if "$ref" in s:
            return self.reference(s, path, depth)
        for key in ("allOf", "anyOf", "oneOf"):
            if key in s:
                return self.combined(key, s, path, depth)
        return self.enumerated(s, path) if "enum" in s else self.typed(s, path, depth)

    def reference(self, s: dict[str, Any], path: str, depth: int) -> Converted:
        """Rewrite a reference. A target is written once for all references to it; siblings are merged into a copy of
        it."""
        pointer = self.document.pointer(s.pop("$ref"), path)
        if s:
            return self.convert(self.merged({"$ref": f"#{pointer}"}, s, path), path, depth + 1)
        if pointer not in self.names:
            name = self.names[pointer] = f"r{len(self.names)}"
            self.defs[name] = {}
            target = self.document.resolve(self.document.target(pointer, path), path)
            self.defs[name] = self.convert(target, f"#{pointer}", depth + 1)
        name = self.names[pointer]
        return None if self.defs[name] is None else {"$ref": f"#/$defs/{name}"}

    def merged(self, a: Schema, b: Schema, path: str) -> Schema:
        """Return the schema of what ``a`` and ``b`` both allow. Raises ``SchemaRefusal``."""
        try:
            return merge(a, b, lambda schema: self.document.resolve(schema, path))
        except MergeError as error:
            raise SchemaRefusal(path, f"subschemas cannot be combined here: {error}", error.keyword) from error
        except RecursionError as error:
            raise SchemaRefusal(path, "subschemas that refer to themselves cannot be combined", "$ref") from error

    def combined(self, key: str, s: dict[str, Any], path: str, depth: int) -> Converted:
        """Rewrite ``allOf``, ``anyOf`` or ``oneOf``, with its siblings moved into the branches."""
        branches, rest = s.pop(key), s
        if key == "allOf":
            whole: Schema = rest
            for index, branch in enumerate(branches):
                whole = self.merged(whole, branch, f"{path}/allOf/{index}")
            return self.convert(whole, path, depth + 1)
        if rest:
            branches = [self.merged(rest, branch, f"{path}/{key}/{i}") for i, branch in enumerate(branches)]
        if key == "oneOf" and not all_disjoint(self.document, branches, path):
            return self.convert(self.document.exclusive(branches, path), path, depth + 1)
        return either(self.convert(branch, f"{path}/{key}/{i}", depth + 1) for i, branch in enumerate(branches))

    def enumerated(self, s: dict[str, Any], path: str) -> Converted:
        """Rewrite ``enum``, with only the values that the other keywords allow."""
        others = {key: part for key, part in s.items() if key != "enum"}
        try:
            values = [
                value for value in s["enum"] if satisfies(value, others, lambda part: self.document.resolve(part, path))
            ]
        except UndecidedError as error:
            raise unsupported(path, str(error), "it is combined with 'enum' or 'const'") from error
        plain = [_plain(value) for value in values if not isinstance(value, list | dict)]
        options: list[Converted] = [{"enum": plain}] if plain else []
        return either([*options, *(_spelled(value) for value in values if isinstance(value, list | dict))])

    def typed(self, s: dict[str, Any], path: str, depth: int) -> Converted:
        """Rewrite a schema as one option for each type, with the keywords that apply to this type."""
        if not s:
            return {}
        types = types_of(s) - ({"integer"} if "number" in types_of(s) else set())
        unknown = types - set(TYPES)
        if unknown:
            raise SchemaRefusal(f"{path}/type", f"'type' is {s['type']!r}; allowed: {', '.join(TYPES)}")
        return either(self.of_type(name, s, path, depth) for name in TYPES if name in types)

    def of_type(self, name: str, s: dict[str, Any], path: str, depth: int) -> Converted:
        """Rewrite the keywords of the type ``name``."""
        if (
            name == "string"
            and self.free_text
            and {"minLength", "maxLength"} & s.keys()
            and s.get("format") not in FORMATS
        ):
            s = {"pattern": "^[\\s\\S]*$", **s}
        values = {"string": schema_values.string, "number": schema_values.number, "integer": schema_values.integer}
        if name in values:
            return values[name](s, path)
        if name in ("array", "object"):
            convert: Callable[[Schema, str], Converted] = lambda schema, at: self.convert(schema, at, depth + 1)  # noqa: E731
            build = schema_objects.array if name == "array" else schema_objects.object_
            return build(s, path, convert, self.strict)
        return {"type": name}


def either(options: Any) -> Converted:
    """Return the union of the options, or None if all of them allow nothing."""
    left = [option for option in options if option is not None]
    return ({"anyOf": left} if len(left) > 1 else left[0]) if left else None


def _plain(value: Any) -> Any:
    """Return a float without a fractional part as an integer, and every other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _spelled(value: Any) -> dict[str, Any]:
    """Return a schema of one JSON value that allows whitespace between its parts. Keys come in the order of the value."""
    if isinstance(value, list):
        items = [_spelled(item) for item in value]
        sizes = {"minItems": len(items)} if items else {"maxItems": 0}
        return {"type": "array", **({"prefixItems": items, "items": False} if items else {}), **sizes}
    if not isinstance(value, dict):
        return {"enum": [_plain(value)]}
    parts = {name: _spelled(item) for name, item in value.items()}
    return {"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False}
