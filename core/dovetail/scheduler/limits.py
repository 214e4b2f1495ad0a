"""The scheduler's bounds and counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.types import DraftTree


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The scheduler's bounds, from config and model. ``reuses_prefixes``: the prefix cache keeps something. ``draft_width`` is the drafter's ``max_draft_tokens``, else 0;
    with ``adapt_drafts`` each request gets fewer where few are accepted; drafts of a lower probability than ``min_draft_probability`` are not verified; ``shared_prefixes`` orders decode batches by the prefixes that their rows share, and fills ``Batch.shared``.
    ``embeds``: the model offers model.embed.
    Groups and sessions keep prefixes locked for ``pin_seconds``, ``pin_pages`` of them in all."""

    max_running: int
    max_waiting: int
    chunk_size: int
    context_len: int
    vocab_size: int
    mixed: bool = True
    reuses_prefixes: bool = True
    wait_for_prefix: bool = True
    draft_width: int = 0
    adapt_drafts: bool = False
    min_draft_probability: float = 0.0
    shared_prefixes: bool = False
    embeds: bool = False
    pin_seconds: float = 60.0
    pin_pages: int = 0

    def adapts(self, drafts: DraftTree) -> bool:
        """Whether what comes of ``drafts`` decides how many a request gets next: of a tree most nodes are there not to be
        accepted, and what is left of a tree may be a chain."""
        return self.adapt_drafts and self.min_draft_probability == 0 and drafts.is_chain


@dataclass(slots=True)
class Totals:
    """Counters since the start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    retractions: int = 0
    pins_taken: int = 0
    pins_dropped: int = 0
    pins_expired: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    draft_steps: int = 0
    verify_steps: int = 0
    jumped_tokens: int = 0
