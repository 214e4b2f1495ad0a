"""Validate client input in bounded time. Pydantic reports every wrong entry, and a body of a few megabytes can contain
millions of them; the server could do nothing else while it lists them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

MAX_FIELDS = 1024
"""Limit the number of members of an object with named fields. An object with more members is refused before its members
are validated."""
MAX_ENTRIES = 1 << 16
"""Limit the number of members of a mapping, such as biases by token."""


def bounded(schema: CoreSchema) -> CoreSchema:
    """Return ``schema``, changed so that lists stop at the first wrong entry, objects with named fields have at most
    ``MAX_FIELDS`` members, and mappings at most ``MAX_ENTRIES``. Mutates ``schema``."""
    return cast("CoreSchema", _bounded(schema))


def _bounded(part: Any) -> Any:
    if isinstance(part, list):
        return [_bounded(each) for each in part]
    if not isinstance(part, dict):
        return part
    for key, value in part.items():
        if isinstance(value, dict | list) and not (key == "metadata" and "type" in part):  # metadata is not a schema
            part[key] = _bounded(value)
    kind = part.get("type")
    if kind in ("list", "set", "tuple") and "serialization" not in part:
        part["fail_fast"] = True
    if kind in ("model", "typed-dict"):
        return _checked(_few_fields, part)
    if kind == "dict" and part.get("values_schema", {}).get("type", "any") != "any":
        return _checked(_few_entries, part)
    return part


def _checked(check: Callable[[Any], Any], part: dict[str, Any]) -> CoreSchema:
    """Return a schema that calls ``check`` on a value before it validates the value with ``part``. References to
    ``part`` then refer to the returned schema."""
    ref = part.pop("ref", None)
    return core_schema.no_info_before_validator_function(check, cast("CoreSchema", part), ref=ref)


def _few_fields(value: Any) -> Any:
    return _at_most(value, MAX_FIELDS)


def _few_entries(value: Any) -> Any:
    return _at_most(value, MAX_ENTRIES)


def _at_most(value: Any, most: int) -> Any:
    if isinstance(value, dict) and len(value) > most:
        raise PydanticCustomError("too_long", "Input should have at most {most} members", {"most": most})
    return value


class Bounded(BaseModel):
    """Validate the model in bounded time. The models of its fields must be ``Bounded`` as well."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the usual schema, bounded."""
        return bounded(handler(source))
