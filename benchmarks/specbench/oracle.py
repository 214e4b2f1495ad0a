"""Provide a drafter with a given acceptance: it replays known outputs of the target, with errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

import dovetail
from dovetail.interfaces.speculative import Drafter
from dovetail.types import Batch, DraftTree, IntArray
from dovetail_speculative.steps import chains

Futures = Mapping[tuple[int, ...], IntArray]
"""Outputs, int32, by prompt."""


class Oracle(Drafter):
    """Propose ``width`` tokens of the known output.

    At each position it proposes a wrong token with probability ``errors``; it is the same token in every run of a
    prompt. All of it is computed in advance, so that a proposal costs only a slice.
    """

    def __init__(self, futures: Futures, width: int, errors: float, vocab_size: int) -> None:
        self._width = width
        self._said: dict[tuple[int, ...], IntArray] = {}
        for prompt, future in futures.items():
            wrong = np.random.default_rng(prompt).random(len(future)) < errors
            self._said[prompt] = np.where(wrong, (future + 1) % vocab_size, future).astype(np.int32)
        self._of: dict[int, IntArray] = {}

    @property
    def max_draft_tokens(self) -> int:
        """Return ``width``."""
        return self._width

    def propose(self, batch: Batch) -> DraftTree | None:
        """See ``Drafter.propose``."""
        assert batch.draft_limits is not None
        drafts: dict[int, IntArray] = {}
        starts, limits = batch.prefix_lens.tolist(), batch.draft_limits.tolist()
        for row in range(batch.num_extend, len(limits)):
            req = batch.reqs[row]
            said = self._of.get(req.uid)
            if said is None:
                said = self._of[req.uid] = self._said[tuple(req.token_ids[: req.prompt_len].tolist())]
            done = starts[row] + 1 - req.prompt_len
            draft = said[done : done + min(self._width, limits[row])]
            if len(draft):
                drafts[row] = draft
        return chains(len(limits), drafts)


def attach(llm: dovetail.LLM, drafter: Drafter) -> None:
    """Give the engine this drafter, and capture its steps."""
    use(llm, drafter)
    with llm.loop.executor.rank.context:
        llm.loop.executor.rank.engine.expect_drafts(drafter.max_draft_tokens, trees=False)
    llm.loop.finish_idle_work()


def use(llm: dovetail.LLM, drafter: Drafter | None) -> None:
    """Let the engine use this drafter from now on, or none. It must be as wide as the drafter that ``attach``
    received."""
    loop = llm.loop
    loop.executor.rank.drafter = drafter
    width = 0 if drafter is None else drafter.max_draft_tokens
    loop.scheduler.limits = replace(loop.scheduler.limits, draft_width=width, adapt_drafts=False)
