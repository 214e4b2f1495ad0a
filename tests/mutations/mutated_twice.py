"""Register one more component with each call."""

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
    """Return ``twice``, once more with each call."""
    _registered.append(SPEC)
    return list(_registered)
