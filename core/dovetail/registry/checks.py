"""Check a ComponentSpec when it registers. Each message shows both sides: what was given and what is expected."""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from dovetail.config.problems import suggest
from dovetail.registry.field_types import type_faults
from dovetail.registry.kinds import NAME, Kinds
from dovetail.registry.specs import ComponentSpec, KindDescriptor, Requirement
from dovetail.registry.targets import TARGET


def faults(spec: object, kinds: Kinds) -> list[str]:
    """Return everything that is wrong with a spec that a plugin returned; empty if it may register."""
    if not isinstance(spec, ComponentSpec):
        return [f"register_components returned {spec!r:.80}; expected dovetail.registry.specs.ComponentSpec"]
    wrong_types = list(type_faults(spec))
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
    for field in ("target", "config", "describe", "expert_format", "probe", "opens"):
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
