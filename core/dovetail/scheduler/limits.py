"""Hold the scheduler's limits and counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from dovetail.interfaces.cache_groups import limiting_group

if TYPE_CHECKING:
    from pydantic import BaseModel

    from dovetail.types import DraftTree


class ProcessorEntry(NamedTuple):
    """Describe a logits processor that requests may name: the class of their parameters, and whether it processes
    drafts."""

    params: type[BaseModel]
    drafts: bool


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Hold the scheduler's limits, which come from the config, the model and the components in use.

    ``reuses_prefixes`` is true if the prefix cache keeps anything. ``fails_late`` is that of ``ExecutorInfo``.
    ``draft_width`` is the drafter's ``max_draft_tokens``, 0 without a drafter; without ``draft_trees`` it drafts chains
    only. With ``adapt_drafts`` a request gets
    fewer drafts if few of them are accepted. Drafts whose probability is below ``min_draft_probability`` are not
    verified. With ``shared_prefixes`` the rows of decode batches are ordered by the prefixes that they share, and
    ``Batch.shared`` is filled. While several tenants send requests, steps with prompts approach ``tenants_step_seconds``
    (0: they are not made shorter). ``embeds`` is true if the model offers model.embed. Groups and sessions keep prefixes
    locked for ``pin_seconds``, at most ``pin_pages`` pages in all. ``processors`` are the logits processors by name.
    ``adapter_slots`` is the number of adapters that the device holds. ``state_snapshot_tokens`` is the distance of
    snapshots of states (see ``scheduler.snapshots``), and a step can keep the states of a prompt after every
    ``state_chunk`` of its tokens in the step (0: only those with which a step begins).
    """

    max_running: int
    max_waiting: int
    chunk_size: int
    context_len: int
    vocab_size: int
    tenants_step_seconds: float = 0.01
    mixed: bool = True
    reuses_prefixes: bool = True
    fails_late: bool = False
    wait_for_prefix: bool = True
    draft_width: int = 0
    draft_trees: bool = True
    adapt_drafts: bool = False
    min_draft_probability: float = 0.0
    shared_prefixes: bool = False
    embeds: bool = False
    pin_seconds: float = 60.0
    pin_pages: int = 0
    state_snapshot_tokens: int | None = None
    state_chunk: int = 0
    processors: Mapping[str, ProcessorEntry] = field(default_factory=dict)
    adapter_slots: int = 0

    def adapts(self, drafts: DraftTree) -> bool:
        """Return True if the number of accepted drafts decides how many drafts a request gets next.

        The number of drafts adapts for chains only, because most nodes of a tree cannot be accepted together. It does
        not adapt with ``min_draft_probability`` either, because a pruned tree may look like a chain.
        """
        return self.adapt_drafts and self.min_draft_probability == 0 and drafts.is_chain


class PageCounts(NamedTuple):
    """Count pages: all pages, the pages that requests read, the pages in the prefix cache, and the pages there that are
    pinned."""

    total: int
    used: int
    cached: int
    pinned: int


@dataclass(slots=True)
class Totals:
    """Count the scheduler's work since the start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    group_cached_tokens: list[int] = field(default_factory=list)  # of several cache groups: sums of Match.reached
    group_limited: list[int] = field(
        default_factory=list
    )  # of several cache groups: prompts whose match each has limited
    generated_tokens: int = 0
    retractions: int = 0
    pins_taken: int = 0
    pins_dropped: int = 0
    pins_expired: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    draft_steps: int = 0
    verify_steps: int = 0
    policy_errors: int = 0
    jumped_tokens: int = 0

    def add_groups(self, reached: Sequence[int]) -> None:
        """Add the prompt tokens that each cache group alone had in the prefix cache."""
        before = self.group_cached_tokens or [0] * len(reached)
        self.group_cached_tokens = [total + own for total, own in zip(before, reached, strict=True)]
        if not self.group_limited:
            self.group_limited = [0] * len(reached)
        if (limiting := limiting_group(reached)) is not None:
            self.group_limited[limiting] += 1
