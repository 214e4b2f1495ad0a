"""Provide the base of drafters that continue from the target's hidden states (EAGLE, MTP).

A head's key and value at index i are computed from the target's hidden state at i and the embedding of the token at i +
1. Its output at i predicts the token at i + 2. When tokens are committed, their hidden states are known, and the head
processes all of them in one pass. To draft, the head continues alone, with its own outputs in place of the target's
hidden states.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from dovetail.interfaces.speculative import DraftCache, Drafter, DrafterContext
from dovetail.ops.transfer import to_device
from dovetail_speculative.observed import ObservedTexts
from dovetail_speculative.steps import ChainSteps, TextSteps, chains

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.types import Batch, Committed, DepartedRequest, DraftTree, ForwardOutput, IntArray
    from dovetail_speculative.steps import CommittedTokens


class DraftRows(NamedTuple):
    """Describe the rows ``rows`` of a batch of ``total`` rows that get drafts, those with the largest limits first.

    The text of row i ends at index ``ends[i]``, where its last token is, which no model has read yet. Its request is in
    slot ``slots[i]`` and has pages for ``limits[i] >= 1`` drafts. All arrays are int32 ``[n]``.
    """

    total: int
    rows: Sequence[int]
    slots: IntArray
    ends: IntArray
    limits: IntArray


class HiddenDrafter(Drafter):
    """Keep, by slot, a head's output at the last index of each request whose tokens were all observed.

    Subclasses call ``runtime.watch`` in their constructor and implement what the head computes. If a token of a request
    was not observed, the request gets no drafts until it starts again. A text whose beginning is in the prefix cache
    finds the head's keys and values there, if the steps that computed them were observed.
    """

    def __init__(
        self,
        context: DrafterContext,
        cache: DraftCache,
        hidden_size: int,
        num_draft_tokens: int,
        *,
        accepted: int | None,
        chains: bool = True,
    ) -> None:
        """Build the drafter.

        ``hidden_size`` is the size of the head's output. ``accepted`` is the largest number of drafts that can be
        accepted in a step. None means that ``step`` uses values on the host and cannot be replayed. ``chains`` means
        that ``draft`` is not overridden.
        """
        assert context.runtime is not None, "drafters that run a model are built by an engine"
        dtype, device = context.runtime.dtype, context.device
        self.cache = cache
        self._texts: TextSteps | None = None
        self._chain: ChainSteps | None = None
        if accepted is not None:
            self._texts = TextSteps(self.step, 1 + accepted, (hidden_size, hidden_size), dtype, device)
            cache.register(self._texts)
        if chains:
            self._chain = ChainSteps(self._next, num_draft_tokens, hidden_size, dtype, device)
            cache.register(self._chain)
        self.device = context.device
        self._outputs = torch.zeros(context.max_rows + 1, hidden_size, dtype=dtype, device=device)
        self._observed = ObservedTexts()
        self._num_draft_tokens = num_draft_tokens

    @property
    def max_draft_tokens(self) -> int:
        """Return ``num_draft_tokens`` of the constructor."""
        return self._num_draft_tokens

    @property
    def must_see_all(self) -> bool:
        """Return True: the hidden state of every token is needed."""
        return True

    @property
    def tokens_ahead(self) -> int:
        """Return 1: a key at index i depends on the token at i + 1 (see the module)."""
        return 1

    # -- what a head computes ----------------------------------------------------------------------------------------

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what ``step`` needs of the target's hidden states ``[tokens, watched layers * their size]``.

        Returns them unchanged, unless a subclass projects them.
        """
        return hidden

    @abstractmethod
    def step(self, batch: Batch, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the head's output ``[tokens, hidden_size]`` for a batch of its cache. Mutates ``batch`` and the cache.

        ``ids`` (int64 ``[tokens]``) are the tokens after each index. ``hidden`` is what ``enter`` returned for that
        index, or what this method returned for the index before it.
        """

    @abstractmethod
    def tokens(self, output: torch.Tensor) -> torch.Tensor:
        """Return the most likely token after each of ``output [n, hidden_size]``, in the target's vocabulary: int64
        ``[n]``."""

    # -- what the loop calls -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def observe(self, batch: Batch, output: ForwardOutput, committed: Committed) -> None:
        """Write the head's keys and values of the tokens that were committed."""
        new = self._observed.take(batch, output, committed)
        if new is not None:
            self._read(batch, new)
            self._observed.finish(batch, new)

    def _read(self, batch: Batch, new: CommittedTokens) -> None:
        """Run the head over the ``new`` tokens and keep its outputs at their last indices."""
        assert batch.hidden is not None, "the engine keeps the layers that are watched"
        slots, counts, texts = batch.slots[new.rows], new.counts, self._texts
        if texts is not None and int(counts.max()) > texts.widths[-1]:
            texts = None
        targets = np.cumsum(counts) - 1 if texts is None else texts.places(counts)
        arrays = [new.index, new.next_ids, slots, targets]
        sent = to_device(np.concatenate(arrays).astype(np.int64), self.device)
        index, next_ids, slots_there, where = sent.split([len(array) for array in arrays])
        entered = self.enter(batch.hidden.index_select(0, index))
        if texts is None:
            own = self.cache.batch(slots, new.starts, counts)
            outputs = self.step(own, next_ids, entered).index_select(0, where)
        else:
            outputs = texts.take(self.cache, (slots, new.starts, counts), where, next_ids, entered)
        self._outputs.index_copy_(0, slots_there, outputs)

    @torch.inference_mode()
    def propose(self, batch: Batch) -> DraftTree | None:
        """Return drafts for the decode rows whose tokens were all observed."""
        assert batch.draft_limits is not None, "no pages were reserved for drafts"
        limits = batch.draft_limits.tolist()
        rows = self._observed.draft_rows(batch, limits)
        if not rows:
            return None
        rows.sort(key=lambda row: -limits[row])
        at, ends = batch.slots[rows], batch.prefix_lens[rows]
        outputs = self._outputs.index_select(0, to_device(at.astype(np.int64), self.device))
        return self.draft(DraftRows(len(limits), rows, at, ends, batch.draft_limits[rows]), outputs)

    def draft(self, rows: DraftRows, outputs: torch.Tensor) -> DraftTree | None:
        """Return drafts of ``rows``, whose last outputs are ``outputs [n, hidden_size]``: chains, unless a subclass
        grows trees."""
        assert self._chain is not None, "the constructor was called with chains=False"
        lens = np.minimum(rows.limits, self._num_draft_tokens)
        drafts = self._chain.draft(self.cache, rows.slots, rows.ends, lens, self.tokens(outputs), outputs)
        return chains(rows.total, {row: drafts[i, : lens[i]] for i, row in enumerate(rows.rows)})

    def _next(self, batch: Batch, ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = self.step(batch, ids, hidden)
        return self.tokens(outputs), outputs

    def forget(self, request: DepartedRequest) -> None:
        """Drop the request's state. Its kept output is not used again."""
        self._observed.forget(request.uid)
