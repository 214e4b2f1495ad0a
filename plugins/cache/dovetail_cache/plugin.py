"""Register the prefix caches and the KV stores of this package. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.interfaces.features import Feature
from dovetail.registry.hookspecs import hookimpl
from dovetail.registry.specs import ComponentKind, ComponentSpec, Constraints

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
    api=(2, 2),
    priority=10,
)

NONE = ComponentSpec(
    kind=ComponentKind.CACHE,
    name="none",
    target="dovetail_cache.none:NoCache",
    config="dovetail_cache.config:NoneConfig",
    summary="Keeps no prefixes: every prompt is computed in full.",
    offers=frozenset({Feature.CACHE_GROUPS}),
    api=(2, 2),
)


EVERY_GROUP = frozenset(
    {
        Feature.STORE_FULL,
        Feature.STORE_SLIDING,
        Feature.STORE_LATENT,
        Feature.STORE_STATE,
        Feature.STORE_SLABS,
    }
)
"""The features of stores that keep every kind of cache group, also in shared slabs."""

PAGED = ComponentSpec(
    kind=ComponentKind.STORE,
    name="paged",
    target="dovetail_cache.stores:PagedStores",
    config="dovetail_cache.config:PagedConfig",
    summary="Keys and values, or latents, as they are, converted to memory.kv_dtype.",
    offers=EVERY_GROUP,
    api=(1, 1),
)

SCALED = ComponentSpec(
    kind=ComponentKind.STORE,
    name="scaled",
    target="dovetail_cache.stores:ScaledStores",
    config="dovetail_cache.config:ScaledConfig",
    summary="Keys and values, or latents, in FP8 with scales: the checkpoint's, or one for each token and head.",
    offers=EVERY_GROUP,
    needs=frozenset({Feature.ATTN_SCALES}),
    api=(1, 1),
    constraints=Constraints(kv_dtypes=("fp8_e4m3",)),
    priority=10,
    describe="dovetail_cache.scales:refuses",
)


@hookimpl
def register_components() -> Sequence[ComponentSpec]:
    """Return the specs of ``radix`` and ``none``, and of the stores ``paged`` and ``scaled``."""
    return (RADIX, NONE, PAGED, SCALED)
