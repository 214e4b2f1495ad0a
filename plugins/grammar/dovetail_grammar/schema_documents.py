"""References inside one schema document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from dovetail_grammar.merge import Schema
from dovetail_grammar.negation import NegationError, exclusive, without_not
from dovetail_grammar.schema_rules import Refusal, tidy, unsupported

MAX_HOPS = 64


class Document:
    """A schema and the places that ``$ref`` can name in it: JSON pointers (RFC 6901) into the same document."""

    def __init__(self, root: Schema) -> None:
        self.root = root
        self._own_id = root.get("$id") if isinstance(root, dict) else None
        self.scoped = _has_scope(root, top=True)
        """True if a part has an ``$id`` of its own that references are read against."""

    def pointer(self, ref: str, path: str) -> str:
        """The fragment of a reference, unquoted. Raises ``Refusal`` for those that leave the document."""
        base, _, fragment = ref.partition("#")
        own = isinstance(self._own_id, str) and base == self._own_id.rstrip("#")
        if (base and not own) or (fragment and not fragment.startswith("/")) or self.scoped:
            raise Refusal(
                f"{path}/$ref",
                f"the reference {ref!r} is not supported by this grammar backend; allowed: pointers into the same "
                "document like '#/$defs/name', without nested $id",
                "$ref",
            )
        return unquote(fragment)

    def target(self, pointer: str, path: str) -> Schema:
        """The schema at a pointer. Raises ``Refusal`` if there is none."""
        value: Any = self.root
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            try:
                value = value[int(key)] if isinstance(value, list) else value[key]
            except (KeyError, IndexError, ValueError, TypeError) as error:
                raise Refusal(path, f"the reference '#{pointer}' points to nothing") from error
        return self.checked(value, path)

    @staticmethod
    def checked(value: Any, path: str) -> Schema:
        """``value``, which must be a schema. Raises ``Refusal``."""
        if not isinstance(value, bool | dict):
            raise Refusal(path, f"a schema is an object or a boolean, not {value!r}")
        return value

    def tidied(self, schema: dict[str, Any], path: str) -> dict[str, Any]:
        """Tidy, and without ``not`` and ``if``. Raises ``Refusal``."""
        key = "not" if "not" in schema else "if"
        if key in schema:
            try:
                schema = without_not(schema, lambda part: self.resolve(part, path))
            except NegationError as error:
                raise unsupported(path, key, f"the opposite of {str(error)!r} has no grammar") from error
        return tidy(schema, path)

    def exclusive(self, branches: list[Schema], path: str) -> Schema:
        """``oneOf`` written without it. Raises ``Refusal``."""
        try:
            return exclusive(branches, lambda part: self.resolve(part, path))
        except NegationError as error:
            why = f"two branches may both be satisfied, and the opposite of {str(error)!r} has no grammar; use anyOf, or a property with a const in each"
            raise unsupported(path, "oneOf", why) from error

    def resolve(self, schema: Schema, path: str) -> Schema:
        """Tidy, with a lone reference replaced by what it names. Raises ``Refusal`` for circles."""
        for _ in range(MAX_HOPS):
            if isinstance(self.checked(schema, path), bool):
                return schema
            assert isinstance(schema, dict)
            schema = self.tidied(schema, path)
            if set(schema) != {"$ref"}:
                return schema
            schema = self.target(self.pointer(schema["$ref"], path), path)
        raise Refusal(path, "the references go round in a circle", "$ref")


def _has_scope(value: Any, *, top: bool = False) -> bool:
    """True if a part of the document has an ``$id`` of its own and references that would be read against it."""
    if isinstance(value, Mapping):
        name = value.get("$id")
        own = not top and isinstance(name, str) and not name.startswith("#")
        return (own and _mentions_ref(value)) or any(_has_scope(part) for part in value.values())
    return isinstance(value, list) and any(_has_scope(part) for part in value)


def _mentions_ref(value: Any) -> bool:
    if isinstance(value, Mapping):
        return isinstance(value.get("$ref"), str) or any(_mentions_ref(part) for part in value.values())
    return isinstance(value, list) and any(_mentions_ref(part) for part in value)
