"""Check a ComponentSpec when it registers. Each message shows both sides: what was given and what is expected."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, get_args, get_origin, get_type_hints

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from dovetail.config.problems import suggest
from dovetail.registry.kinds import Kinds
from dovetail.registry.specs import ComponentSpec, KindDescriptor, Requirement

TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
NAME = re.compile(r"[a-z][a-z0-9_]*")


def faults(spec: object, kinds: Kinds) -> list[str]:
    """Return everything that is wrong with a spec that a plugin returned; empty if it may register."""
    if not isinstance(spec, ComponentSpec):
        return [f"register_components returned {spec!r:.80}; expected dovetail.registry.specs.ComponentSpec"]
    wrong_types = list(_types(spec))
    return wrong_types or list(_values(spec, kinds))


def api_fault(spec: ComponentSpec, descriptor: KindDescriptor) -> str | None:
    """Return why a component built for another version of its interface cannot be used, or None."""
    ours = descriptor.api
    if spec.api[0] == ours[0] and spec.api[1] <= ours[1]:
        return None
    side = "the plugin" if spec.api < ours else "dovetail"
    return (
        f"it was built for version {_dotted(spec.api)} of the {spec.kind} interface; this dovetail has {_dotted(ours)}: "
        f"update {side}"
    )


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _types(spec: ComponentSpec) -> Iterator[str]:
    hints = _hints()
    for field in fields(spec):
        value, expected = getattr(spec, field.name), hints[field.name]
        if not _is_a(value, expected):
            name = getattr(expected, "__name__", None) if get_origin(expected) is None else str(expected)
            yield f"{field.name} is {value!r:.80}; expected {name or expected}"


@functools.cache
def _hints() -> dict[str, Any]:
    return get_type_hints(ComponentSpec)


def _is_a(value: object, expected: object) -> bool:
    origin, args = get_origin(expected), get_args(expected)
    if origin is tuple:
        members = value if isinstance(value, tuple) else ()
        kinds = [args[0]] * len(members) if args[-1] is Ellipsis else list(args)
        return isinstance(value, tuple) and len(kinds) == len(members) and all(map(_is_a, members, kinds))
    if origin is frozenset:
        return isinstance(value, frozenset) and all(isinstance(item, args[0]) for item in value)
    if args:
        return any(_is_a(value, member) for member in args)
    return isinstance(value, expected) and not isinstance(value, bool)  # type: ignore[arg-type]


def _values(spec: ComponentSpec, kinds: Kinds) -> Iterator[str]:
    if spec.kind not in kinds:
        names = kinds.names
        yield f"kind is {spec.kind!r}, which no plugin registers; kinds: {', '.join(names)}{suggest(spec.kind, names)}"
        return
    descriptor = kinds[spec.kind]
    if not NAME.fullmatch(spec.name):
        yield f"name is {spec.name!r}; expected lower-case letters, digits and underscores"
    if spec.name in descriptor.reserved:
        yield f"name is {spec.name!r}, a word that config sections of this kind already use"
    for field in ("target", "config", "describe", "probe"):
        value = getattr(spec, field)
        if value is not None and not TARGET.fullmatch(value):
            yield f'{field} is {value!r}; expected "module:attribute"'
    if descriptor.described and spec.describe is None:
        yield 'describe is None; expected the "module:function" that reads config.json'
    if spec.template is not None:
        yield from _pattern(spec.template)
    for field in ("offers", "needs"):
        yield from (f"{field}: {text}" for text in kinds.unknown_features(getattr(spec, field)))
    for requirement in spec.requires:
        yield from _requirement(requirement)


def _pattern(template: str) -> Iterator[str]:
    try:
        re.compile(template)
    except re.error as error:
        yield f"template is {template!r}; expected a regular expression ({error})"


def _requirement(requirement: Requirement) -> Iterator[str]:
    try:
        SpecifierSet(requirement.versions)
    except InvalidSpecifier:
        yield (
            f"requires {requirement.distribution} with versions {requirement.versions!r}; "
            "expected a PEP 440 range like '>=1.2,<2'"
        )
