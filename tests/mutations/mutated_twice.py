"""A plugin that registers once more each time that it is asked."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.registry.hookspecs import hookimpl
from dovetail.registry.specs import ComponentKind, ComponentSpec

SPEC = ComponentSpec(
    ComponentKind.POLICY, "twice", "dovetail_policies.simple:Fcfs", "mutated_config:TwiceConfig", "First come."
)
_registered: list[ComponentSpec] = []


@hookimpl
def register_components() -> Sequence[ComponentSpec]:
    """``twice``, and again."""
    _registered.append(SPEC)
    return list(_registered)
