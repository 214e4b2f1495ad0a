"""Register a plugin whose attention is plain, and wrong or slow where its config selects it (``planted_attention``)."""

from __future__ import annotations

from dovetail.interfaces.features import Feature
from dovetail.registry.hookspecs import hookimpl
from dovetail.registry.specs import ComponentKind, ComponentSpec


@hookimpl
def register_components() -> list[ComponentSpec]:
    """Return ``planted``."""
    return [
        ComponentSpec(
            kind=ComponentKind.ATTENTION,
            name="planted",
            target="planted_attention:PlantedAttention",
            config="planted_config:PlantedConfig",
            summary="Wrong or slow on purpose.",
            offers=frozenset({Feature.ATTN_EXTEND, Feature.ATTN_DECODE, Feature.ATTN_MIXED}),
            priority=-100,
        )
    ]
