"""State which lists of rewriters do not fit together."""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.registry.fit import Situation
from dovetail.registry.resolution import Reason
from dovetail_prompt_rewriters.kind import NORMALIZES, PROMPT_REWRITER


def order(situation: Situation) -> Iterator[Reason]:
    """Require that a rewriter that needs normalized text comes after one that normalizes."""
    chosen = situation.candidates(PROMPT_REWRITER)
    normalizing = [index for index, candidate in enumerate(chosen) if NORMALIZES in candidate.spec.offers]
    for index, candidate in enumerate(chosen):
        if NORMALIZES in candidate.spec.needs and normalizing and index < normalizing[0]:
            first = chosen[normalizing[0]].spec.name
            yield Reason(
                "prompt_rewriter.order",
                f"prompt_rewriter {candidate.spec.name!r} must come after the one that normalizes",
                f"it comes before {first!r}",
            )
