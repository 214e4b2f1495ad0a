"""Resolve references inside one schema document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from dovetail_grammar.merge import Schema
from dovetail_grammar.negation import NegationError, exclusive, without_not
from dovetail_grammar.schema_rules import SchemaRefusal, tidy, unsupported

MAX_HOPS = 64


class SchemaDocument:
    """Hold a schema and resolve the targets of ``$ref`` in it: JSON pointers (RFC 6901) into the same document."""

    def __init__(self, root: Schema) -> None:
        self.root = root
        self._own_id = root.get("$id") if isinstance(root, dict) else None
        self.scoped = _has_scope(root, top=True)
        """True if a part of the document has its own ``$id``, which references are resolved against."""

    def pointer(self, ref: str, path: str) -> str:
        """Return the unquoted fragment of a reference. Raises ``SchemaRefusal`` if the reference leaves the document."""
        base, _, fragment = ref.partition("#")
        own = isinstance(self._own_id, str) and base == self._own_id.rstrip("#")
        if (base and not own) or (fragment and not fragment.startswith("/")) or self.scoped:
            raise SchemaRefusal(
                f"{path}/$ref",
                f"the reference {ref!r} is not supported by this grammar backend; allowed: pointers into the same "
                "document like '#/$defs/name', without nested $id",
                "$ref",
            )
        return unquote(fragment)

    def target(self, pointer: str, path: str) -> Schema:
        """Return the schema at a pointer. Raises ``SchemaRefusal`` if there is none."""
        value: Any = self.root
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            try:
                value = value[int(key)] if isinstance(value, list) else value[key]
            except (KeyError, IndexError, ValueError, TypeError) as error:
                raise SchemaRefusal(path, f"the reference '#{pointer}' points to nothing") from error
        return self.checked(value, path)

    @staticmethod
    def checked(value: Any, path: str) -> Schema:
        """Return ``value``, which must be a schema. Raises ``SchemaRefusal``."""
        if not isinstance(value, bool | dict):
            raise SchemaRefusal(path, f"a schema is an object or a boolean, not {value!r}")
        return value

    def tidied(self, schema: dict[str, Any], path: str) -> dict[str, Any]:
        """Return the schema tidy, and without ``not`` and ``if``. Raises ``SchemaRefusal``."""
        key = "not" if "not" in schema else "if"
        if key in schema:
            try:
                schema = without_not(schema, lambda part: self.resolve(part, path))
            except NegationError as error:
                raise unsupported(path, key, f"the opposite of {str(error)!r} has no grammar") from error
        return tidy(schema, path)

    def exclusive(self, branches: list[Schema], path: str) -> Schema:
        """Return the ``oneOf`` of ``branches`` as a schema without ``oneOf``. Raises ``SchemaRefusal``."""
        try:
            return exclusive(branches, lambda part: self.resolve(part, path))
        except NegationError as error:
            why = f"two branches may both be satisfied, and the opposite of {str(error)!r} has no grammar; use anyOf, or a property with a const in each"
            raise unsupported(path, "oneOf", why) from error

    def resolve(self, schema: Schema, path: str) -> Schema:
        """Return the schema tidy. A schema that is only a reference is replaced by its target. Raises ``SchemaRefusal``
        for circular references."""
        for _ in range(MAX_HOPS):
            if isinstance(self.checked(schema, path), bool):
                return schema
            assert isinstance(schema, dict)
            schema = self.tidied(schema, path)
            if set(schema) != {"$ref"}:
                return schema
            schema = self.target(self.pointer(schema["$ref"], path), path)
        raise SchemaRefusal(path, "the references are circular", "$ref")


def _has_scope(value: Any, *, top: bool = False) -> bool:
    """Return true if a part of the document has its own ``$id`` and references that would be resolved against it."""
    if isinstance(value, Mapping):
        name = value.get("$id")
        own = not top and isinstance(name, str) and not name.startswith("#")
        return (own and _mentions_ref(value)) or any(_has_scope(part) for part in value.values())
    return isinstance(value, list) and any(_has_scope(part) for part in value)


def _mentions_ref(value: Any) -> bool:
    if isinstance(value, Mapping):
        return isinstance(value.get("$ref"), str) or any(_mentions_ref(part) for part in value.values())
    return isinstance(value, list) and any(_mentions_ref(part) for part in value)
