"""Check the field types of the descriptors and specs that plugins return, because dataclasses do not check them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints


def type_faults(value: Any) -> Iterator[str]:
    """Yield a text for each field of the dataclass instance ``value`` whose value does not have the declared type. The
    text shows the value and the type."""
    hints = _hints(type(value))
    for field in fields(value):
        given, expected = getattr(value, field.name), hints[field.name]
        if not _is_a(given, expected):
            name = getattr(expected, "__name__", None) if get_origin(expected) is None else str(expected)
            yield f"{field.name} is {given!r:.80}; expected {name or expected}"


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _is_a(value: object, expected: Any) -> bool:
    origin, args = get_origin(expected), get_args(expected)
    if origin is tuple:
        members = value if isinstance(value, tuple) else ()
        types = [args[0]] * len(members) if args[-1] is Ellipsis else list(args)
        return isinstance(value, tuple) and len(types) == len(members) and all(map(_is_a, members, types))
    if origin is frozenset:
        return isinstance(value, frozenset) and all(isinstance(item, args[0]) for item in value)
    if origin is type:
        return isinstance(value, type) and issubclass(value, args[0])
    if origin is Literal:
        return value in args
    if args:
        return any(_is_a(value, member) for member in args)
    return isinstance(value, expected) and (expected is bool or not isinstance(value, bool))
