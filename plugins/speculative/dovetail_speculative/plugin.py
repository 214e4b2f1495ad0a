"""What this package registers. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.interfaces.features import Feature
from dovetail.plugins.hookspecs import hookimpl
from dovetail.plugins.specs import ComponentKind, ComponentSpec

NGRAM = ComponentSpec(
    kind=ComponentKind.DRAFTER,
    name="ngram",
    target="dovetail_speculative.ngram:NgramDrafter",
    config="dovetail_speculative.config:NgramConfig",
    summary="Prompt lookup: drafts what followed the last occurrence of the latest tokens.",
    offers=frozenset({Feature.DRAFT_CHAIN}),
    needs=frozenset({Feature.ATTN_VERIFY, Feature.KV_ROLLBACK, Feature.RUNTIME_HOST_TOKENS}),
)

_OF_HIDDEN_STATES = frozenset(
    {Feature.ATTN_VERIFY, Feature.KV_ROLLBACK, Feature.RUNTIME_HOST_TOKENS, Feature.MODEL_HIDDEN_STATES}
)

DFLASH = ComponentSpec(
    kind=ComponentKind.DRAFTER,
    name="dflash",
    target="dovetail_speculative.dflash:DFlashDrafter",
    config="dovetail_speculative.config:DFlashConfig",
    summary="Block diffusion: a small model drafts a block in one pass over hidden states of the target.",
    offers=frozenset({Feature.DRAFT_CHAIN}),
    needs=_OF_HIDDEN_STATES | {Feature.ATTN_TREE_MASK},
)


@hookimpl
def register_drafters() -> Sequence[ComponentSpec]:
    """``ngram``."""
    return (NGRAM, DFLASH)
