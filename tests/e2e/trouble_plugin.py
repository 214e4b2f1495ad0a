"""Register a plugin whose attention fails on demand (``trouble_attention``)."""

from __future__ import annotations

from dovetail.interfaces.features import Feature
from dovetail.registry.hookspecs import hookimpl
from dovetail.registry.specs import ComponentKind, ComponentSpec


@hookimpl
def register_components() -> list[ComponentSpec]:
    """Return ``trouble``."""
    return [
        ComponentSpec(
            kind=ComponentKind.ATTENTION,
            name="trouble",
            target="trouble_attention:TroubledAttention",
            config="trouble_config:TroubleConfig",
            summary="Fails on demand.",
            offers=frozenset({Feature.ATTN_EXTEND, Feature.ATTN_DECODE, Feature.ATTN_MIXED, Feature.ATTN_GRAPH}),
            priority=-100,
        )
    ]
