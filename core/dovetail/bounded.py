"""Validation of what comes from outside in bounded time: pydantic reports every wrong entry, of which a body of some megabytes has
millions, and nothing else runs in the server meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

MAX_FIELDS = 1024
"""Members of an object with named fields; beyond it they are not looked at one by one."""
MAX_ENTRIES = 1 << 16
"""Members of a mapping, such as biases by token."""


def bounded(schema: CoreSchema) -> CoreSchema:
    """``schema``, in which lists stop at the first wrong entry, objects with named fields have ``MAX_FIELDS`` members at most and
    mappings ``MAX_ENTRIES``. Mutates it."""
    return cast("CoreSchema", _bounded(schema))


def _bounded(part: Any) -> Any:
    if isinstance(part, list):
        return [_bounded(each) for each in part]
    if not isinstance(part, dict):
        return part
    for key, value in part.items():
        if isinstance(value, dict | list) and not (key == "metadata" and "type" in part):  # which is no schema
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
    """``part``, looked at after ``check`` alone. What refers to it means both."""
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
    """A model that is validated in bounded time. What it is made of must be such models too."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The usual one, bounded."""
        return bounded(handler(source))
