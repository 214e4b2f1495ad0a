"""Register the prefix caches of this package. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.interfaces.features import Feature
from dovetail.registry.hookspecs import hookimpl
from dovetail.registry.specs import ComponentKind, ComponentSpec

RADIX = ComponentSpec(
    kind=ComponentKind.CACHE,
    name="radix",
    target="dovetail_cache.radix:RadixCache",
    config="dovetail_cache.config:RadixConfig",
    summary="Radix tree over token runs; evicts unlocked leaves by recency, frequency or priority.",
    offers=frozenset(
        {
            Feature.CACHE_REUSE,
            Feature.CACHE_NAMESPACES,
            Feature.CACHE_EVICT,
            Feature.CACHE_GROUPS,
            Feature.CACHE_SHARED_PREFIXES,
        }
    ),
    api=(2, 1),
    priority=10,
)

NONE = ComponentSpec(
    kind=ComponentKind.CACHE,
    name="none",
    target="dovetail_cache.none:NoCache",
    config="dovetail_cache.config:NoneConfig",
    summary="Keeps no prefixes: every prompt is computed in full.",
    offers=frozenset({Feature.CACHE_GROUPS}),
    api=(2, 1),
)


@hookimpl
def register_components() -> Sequence[ComponentSpec]:
    """Return the specs of ``radix`` and ``none``."""
    return (RADIX, NONE)
