"""Draft what followed the same tokens before."""

from __future__ import annotations

import numpy as np

from dovetail.interfaces.speculative import Drafter, DrafterContext
from dovetail.types import Batch, DraftTree, IntArray
from dovetail_example.config import BigramConfig


class BigramDrafter(Drafter):
    """Draft what followed the last two tokens when they occurred before. Keep no state."""

    def __init__(self, config: BigramConfig, context: DrafterContext) -> None:
        self._most = config.num_draft_tokens

    @property
    def max_draft_tokens(self) -> int:
        """See ``Drafter``."""
        return self._most

    def propose(self, batch: Batch) -> DraftTree | None:
        """See ``Drafter``. Return a chain for each decode row with a draft."""
        assert batch.draft_limits is not None
        rows, ends = len(batch.slots), batch.prefix_lens + 1  # the host knows this number of tokens of a decode row
        token_ids = np.zeros((rows, self._most), np.int32)
        lens = np.zeros(rows, np.int32)
        for row in range(batch.num_extend, rows):
            text = batch.reqs[row].token_ids[: ends[row]]
            draft = self._follow(text, min(int(batch.draft_limits[row]), self._most))
            lens[row] = len(draft)
            token_ids[row, : len(draft)] = draft
        parents = np.tile(np.arange(-1, self._most - 1, dtype=np.int32), (rows, 1))
        return DraftTree(token_ids, parents, lens) if lens.any() else None

    @staticmethod
    def _follow(text: IntArray, count: int) -> IntArray:
        """Return at most ``count`` tokens after the last earlier occurrence of the bigram that ends the text."""
        if len(text) < 3:
            return text[:0]
        places = np.flatnonzero((text[:-2] == text[-2]) & (text[1:-1] == text[-1]))
        return text[places[-1] + 2 :][:count] if len(places) else text[:0]
