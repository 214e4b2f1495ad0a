"""Register the executors of this package. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.interfaces.features import Feature
from dovetail.registry.hookspecs import hookimpl
from dovetail.registry.specs import ComponentKind, ComponentSpec

LOCAL = ComponentSpec(
    kind=ComponentKind.EXECUTOR,
    name="local",
    target="dovetail_executors.local:Local",
    config="dovetail_executors.config:LocalConfig",
    summary="One rank, in the engine's own process.",
    priority=10,
)

WORKERS = ComponentSpec(
    kind=ComponentKind.EXECUTOR,
    name="workers",
    target="dovetail_executors.workers.executor:Workers",
    config="dovetail_executors.config:WorkersConfig",
    summary="Each rank in a process of its own on this host; plans go through shared memory.",
    offers=frozenset({Feature.EXECUTOR_RANKS}),
    probe="dovetail_executors.workers.probe:probe",
)


@hookimpl
def register_components() -> Sequence[ComponentSpec]:
    """Return the specs of ``local`` and ``workers``."""
    return (LOCAL, WORKERS)
