"""Keep which texts a drafter with hidden states of the target can continue: those of which it has observed every token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dovetail_speculative.steps import committed_tokens

if TYPE_CHECKING:
    from dovetail.types import Batch, Committed, ForwardOutput
    from dovetail_speculative.steps import CommittedTokens

MISSED = -1
"""The value in place of a length if tokens of the request were not observed."""


class ObservedTexts:
    """Keep, by uid, how many tokens of a request's text the drafter has read. If a token was not observed, the request gets no drafts
    until it starts again."""

    def __init__(self) -> None:
        self._lens: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the number of requests of which something is kept."""
        return len(self._lens)

    def __contains__(self, uid: int) -> bool:
        """Return True if tokens of the request have been committed since it started."""
        return uid in self._lens

    def take(self, batch: Batch, output: ForwardOutput, committed: Committed) -> CommittedTokens | None:
        """Return the tokens of a step that the drafter reads now, or None if there are none: those that have been committed, in rows of
        which every token was observed. All rows of the step count as missed until ``finish`` is called. No state is kept of those that
        have ended."""
        new = committed_tokens(batch, output, committed)
        if new is None:
            return None
        seen = np.zeros(len(new.rows), np.bool_)
        for i, (row, start) in enumerate(zip(new.rows.tolist(), new.starts.tolist(), strict=True)):
            uid = batch.reqs[row].uid
            before = self._lens.get(uid)
            seen[i] = start == before if before is not None else row < batch.num_extend
            if not committed.ended[row]:
                self._lens[uid] = MISSED
        return new[seen] if seen.any() else None

    def finish(self, batch: Batch, new: CommittedTokens) -> None:
        """Record that the drafter has read ``new``, which ``take`` has returned."""
        for row, length in zip(new.rows.tolist(), (new.starts + new.counts).tolist(), strict=True):
            if batch.reqs[row].uid in self._lens:  # otherwise it has ended and was forgotten
                self._lens[batch.reqs[row].uid] = length

    def draft_rows(self, batch: Batch, limits: list[int]) -> list[int]:
        """Return the decode rows that get drafts: those with a positive number in ``limits`` whose tokens were all observed."""
        starts = batch.prefix_lens.tolist()
        return [
            row
            for row in range(batch.num_extend, len(limits))
            if limits[row] > 0 and self._lens.get(batch.reqs[row].uid) == starts[row]
        ]

    def forget(self, uid: int) -> None:
        """Drop the state of a request."""
        self._lens.pop(uid, None)
