"""Register the logits processors of this package. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.interfaces.features import Feature
from dovetail.registry.hookspecs import hookimpl
from dovetail.registry.specs import ComponentKind, ComponentSpec

NO_REPEAT_NGRAM = ComponentSpec(
    kind=ComponentKind.LOGITS_PROCESSOR,
    name="no_repeat_ngram",
    target="dovetail_logits.no_repeat_ngram:NoRepeatNgram",
    config="dovetail_logits.config:NoRepeatNgramConfig",
    summary="No sequence of n tokens occurs twice in prompt and output.",
    offers=frozenset({Feature.LOGITS_DRAFTS, Feature.LOGITS_BATCH_INVARIANT}),
)


@hookimpl
def register_components() -> Sequence[ComponentSpec]:
    """Return the spec of ``no_repeat_ngram``."""
    return (NO_REPEAT_NGRAM,)
