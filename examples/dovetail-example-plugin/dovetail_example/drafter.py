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
        rows = len(batch.reqs)
        token_ids = np.zeros((rows, self._most), np.int32)
        lens = np.zeros(rows, np.int32)
        for row in range(batch.num_extend, rows):
            req = batch.reqs[row]
            draft = self._follow(req.token_ids[: req.known_len], min(int(batch.draft_limits[row]), self._most))
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
