"""Define the draft tokens of a batch, and what a drafter learns of a committed step."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dovetail.types.arrays import BoolArray, FloatArray, IntArray


@dataclass(slots=True)
class DraftTree:
    """Hold the draft tokens of every row of a batch, in topological order.

    ``parents[r, j] < j`` is the index of the parent node; -1 stands for the row's last token. A chain has ``parents[r]
    = [-1, 0, 1, ...]``. Rows without drafts have ``lens[r] = 0``.

    ``probs[r, j]`` (0 to 1) is the probability that the drafter gives to draft j and all its ancestors together, given
    the text; it is at most the parent's. Entries beyond ``lens`` may hold anything. Drafts below
    ``scheduler.min_draft_probability`` are not verified; which of the verified drafts are accepted does not depend on
    ``probs``. The arrays must not change after the first read of ``is_chain``.
    """

    token_ids: IntArray  # [rows, k]
    parents: IntArray  # [rows, k]
    lens: IntArray  # [rows]
    probs: FloatArray | None = None  # [rows, k], of drafters that offer draft.probs

    _chain: bool | None = field(init=False, default=None, repr=False)

    @classmethod
    def chains(cls, token_ids: IntArray, lens: IntArray) -> DraftTree:
        """Return a tree with a chain in every row. Its ``parents`` are read-only."""
        tree = cls(token_ids, _chain_parents(*token_ids.shape), lens)
        tree._chain = True
        return tree

    @property
    def is_chain(self) -> bool:
        """Return True if every node's parent is the node before it."""
        if self._chain is None:
            nodes = np.arange(self.parents.shape[1])
            self._chain = not ((self.parents != nodes - 1) & (nodes < self.lens[:, None])).any()
        return self._chain

    def row(self, row: int) -> tuple[list[int], list[int]]:
        """Return the draft tokens of a row and their parents."""
        count = int(self.lens[row])
        return self.token_ids[row, :count].tolist(), self.parents[row, :count].tolist()


@functools.lru_cache(maxsize=256)
def _chain_parents(rows: int, width: int) -> IntArray:
    return np.broadcast_to(np.arange(-1, width - 1, dtype=np.int32), (rows, width))


class Committed(NamedTuple):
    """Hold what a drafter learns of the rows of a committed step: the number of tokens that the host knows of each
    request (int32 ``[rows]``), and whether the request has ended (bool ``[rows]``)."""

    known_lens: IntArray
    ended: BoolArray
