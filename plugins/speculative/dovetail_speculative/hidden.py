"""The base of drafters that go on from the target's hidden states (EAGLE, MTP).

A head's key and value at place i are made of the target's hidden state at i and the embedding of the token at i + 1; its
output there says which token is at i + 2. As tokens are committed, their hidden states are known: the head sees them all in
one pass. To draft it goes on alone, with its own output in the hidden state's stead.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from dovetail.interfaces.speculative import DraftCache, Drafter, DrafterContext
from dovetail.ops.transfer import to_device
from dovetail_speculative.steps import ChainSteps, TextSteps, chains, committed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.types import Batch, BoolArray, DraftTree, ForwardOutput, IntArray, Req
    from dovetail_speculative.steps import Committed

MISSED = -2
"""In place of a place: tokens of the request went unseen. No place follows it."""


class DraftRows(NamedTuple):
    """Rows ``rows`` of a batch of ``total``. The text of row i ends at place ``ends[i]`` (its last token is there, which no
    model has seen yet), it is in slot ``slots[i]`` and has pages for ``limits[i] >= 1`` drafts, those with the most first. All
    int32 ``[n]``."""

    total: int
    rows: Sequence[int]
    slots: IntArray
    ends: IntArray
    limits: IntArray


class HiddenDrafter(Drafter):
    """Keeps, by slot, a head's output at the last place of each request of which it has seen every token.

    Subclasses call ``runtime.watch`` in their constructor, and say what the head computes. A request of which a token was
    missed is not drafted for until it starts anew. A text that begins in the prefix cache finds the head's keys and values
    there, where the steps that computed it were observed.
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
        """``hidden_size`` is that of the head's output. ``accepted`` is the most drafts that can be accepted at once; None: ``step``
        asks the host, and cannot be replayed. ``chains``: ``draft`` is the one of this class."""
        assert context.runtime is not None, "drafters that run a model are built by an engine"
        dtype, device = context.runtime.dtype, context.device
        self.cache = cache
        self._texts: TextSteps | None = None
        self._chain: ChainSteps | None = None
        if accepted is not None:
            self._texts = TextSteps(self.step, 1 + accepted, (hidden_size, hidden_size), dtype, device)
            cache.register(self._texts)
        if chains:
            self._chain = ChainSteps(self._go_on, num_draft_tokens, hidden_size, dtype, device)
            cache.register(self._chain)
        self.device = context.device
        self._outputs = torch.zeros(context.max_rows + 1, hidden_size, dtype=dtype, device=device)
        self._places: dict[int, int] = {}  # by uid: the place that the output is of
        self._num_draft_tokens = num_draft_tokens

    @property
    def max_draft_tokens(self) -> int:
        """``num_draft_tokens`` of the constructor."""
        return self._num_draft_tokens

    @property
    def must_see_all(self) -> bool:
        """True: every token's hidden state is needed."""
        return True

    @property
    def tokens_ahead(self) -> int:
        """1: see the module."""
        return 1

    # -- what a head says --------------------------------------------------------------------------------------------

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """What ``step`` takes of the target's hidden states ``[tokens, watched layers * their size]``. As they are, unless a
        subclass projects them."""
        return hidden

    @abstractmethod
    def step(self, batch: Batch, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The head's output ``[tokens, hidden_size]`` for a batch of its cache: of ``ids`` int64 ``[tokens]``, the token after
        each place, and ``hidden``: what ``enter`` returned for that place, or this method for the one before it."""

    @abstractmethod
    def tokens(self, output: torch.Tensor) -> torch.Tensor:
        """The most likely token after each of ``output [n, hidden_size]``, in the target's vocabulary: int64 ``[n]``."""

    # -- what the loop asks ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def observe(self, batch: Batch, output: ForwardOutput) -> None:
        """Bring the head's keys and values up to the text."""
        new = committed(batch, output)
        if new is None:
            return
        new = new[self._seen(batch, new)]
        if not len(new.rows):
            return
        self._read(batch, new)
        for row, place in zip(new.rows.tolist(), (new.starts + new.counts - 1).tolist(), strict=True):
            if batch.reqs[row].uid in self._places:  # else it has ended, and been forgotten
                self._places[batch.reqs[row].uid] = place

    def _read(self, batch: Batch, new: Committed) -> None:
        """Keep the outputs of the last of the ``new`` tokens."""
        assert batch.hidden is not None, "the engine keeps the layers that are watched"
        slots, counts, texts = batch.slots[new.rows], new.counts, self._texts
        if texts is not None and int(counts.max()) > texts.widths[-1]:
            texts = None
        where_to = np.cumsum(counts) - 1 if texts is None else texts.places(counts)
        arrays = [new.index, new.next_ids, slots, where_to]
        sent = to_device(np.concatenate(arrays).astype(np.int64), self.device)
        index, next_ids, slots_there, where = sent.split([len(array) for array in arrays])
        entered = self.enter(batch.hidden.index_select(0, index))
        if texts is None:
            own = self.cache.batch(slots, new.starts, counts)
            outputs = self.step(own, next_ids, entered).index_select(0, where)
        else:
            outputs = texts.take(self.cache, (slots, new.starts, counts), where, next_ids, entered)
        self._outputs.index_copy_(0, slots_there, outputs)

    def _seen(self, batch: Batch, new: Committed) -> BoolArray:
        """Of which rows nothing was missed before. Until the pass over their tokens has succeeded, all count as missed."""
        seen = np.zeros(len(new.rows), np.bool_)
        for i, (row, start) in enumerate(zip(new.rows.tolist(), new.starts.tolist(), strict=True)):
            uid = batch.reqs[row].uid
            before = self._places.get(uid)
            seen[i] = start == before + 1 if before is not None else row < batch.num_extend
            if batch.reqs[row].finish is None:
                self._places[uid] = MISSED
        return seen

    @torch.inference_mode()
    def propose(self, batch: Batch) -> DraftTree | None:
        """Drafts for the decode rows of which every token was seen."""
        assert batch.draft_limits is not None, "pages were reserved for no drafts"
        rows = [
            row
            for row in range(batch.num_extend, len(batch.reqs))
            if batch.draft_limits[row] > 0 and self._places.get(batch.reqs[row].uid) == batch.reqs[row].known_len - 2
        ]
        if not rows:
            return None
        rows.sort(key=lambda row: -int(batch.draft_limits[row]))  # pyright: ignore[reportOptionalSubscript]
        at = batch.slots[rows]
        ends = np.array([batch.reqs[row].known_len - 1 for row in rows], np.int32)
        outputs = self._outputs.index_select(0, to_device(at.astype(np.int64), self.device))
        return self.draft(DraftRows(len(batch.reqs), rows, at, ends, batch.draft_limits[rows]), outputs)

    def draft(self, rows: DraftRows, outputs: torch.Tensor) -> DraftTree | None:
        """Drafts of ``rows``, whose last outputs are ``outputs [n, hidden_size]``: chains, unless a subclass grows trees."""
        assert self._chain is not None, "the constructor was told that chains are drafted"
        lens = np.minimum(rows.limits, self._num_draft_tokens)
        drafts = self._chain.draft(self.cache, rows.slots, rows.ends, lens, self.tokens(outputs), outputs)
        return chains(rows.total, {row: drafts[i, : lens[i]] for i, row in enumerate(rows.rows)})

    def _go_on(self, batch: Batch, ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = self.step(batch, ids, hidden)
        return self.tokens(outputs), outputs

    def forget(self, req: Req) -> None:
        """Its output is nobody's any more."""
        self._places.pop(req.uid, None)
