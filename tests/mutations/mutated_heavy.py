"""Import torch to list the plugin's components."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dovetail.registry.hookspecs import hookimpl
from dovetail.registry.specs import ComponentKind, ComponentSpec

SPEC = ComponentSpec(
    ComponentKind.POLICY,
    "heavy",
    "dovetail_policies.simple:Fcfs",
    "mutated_config:HeavyConfig",
    f"First come, first served, on {torch.__name__}.",
)


@hookimpl
def register_components() -> Sequence[ComponentSpec]:
    """Return ``heavy``."""
    return [SPEC]
