"""Provide drafters that draft badly, each in another way. With all of them, outputs must equal those of decoding without
drafts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dovetail.interfaces.speculative import Drafter
from dovetail.types import Batch, DraftTree, FloatArray, IntArray

Nodes = Sequence[tuple[int, int]]
"""The drafts of one row as (token, parent), parents before their children; the parent -1 is the row's last token."""


class Adversary(Drafter):
    """Draft for each row what ``nodes`` returns, and fill the rest of the arrays with junk."""

    def __init__(self, vocab_size: int, width: int = 5, seed: int = 0) -> None:
        """Build the drafter. ``width`` is the largest number of nodes of a row."""
        self.vocab_size = vocab_size
        self.rng = np.random.default_rng(seed)
        self._width = width

    @property
    def max_draft_tokens(self) -> int:
        """Return ``width``."""
        return self._width

    @abstractmethod
    def nodes(self, text: IntArray, limit: int) -> Nodes:
        """Return at most ``limit >= 1`` drafts after ``text``, for one row."""

    def propose(self, batch: Batch) -> DraftTree | None:
        """Return drafts for the decode rows whose limit is positive."""
        assert batch.draft_limits is not None
        shape = len(batch.slots), self._width
        ids = self.rng.integers(-9, 10**6, shape).astype(np.int32)
        parents = self.rng.integers(-9, 10**6, shape).astype(np.int32)
        lens = np.zeros(len(ids), np.int32)
        for row in range(batch.num_extend, len(ids)):
            limit = min(int(batch.draft_limits[row]), self._width)
            text = batch.reqs[row].token_ids[: batch.prefix_lens[row] + 1]
            for place, (token, parent) in enumerate(self.nodes(text, limit) if limit > 0 else ()):
                ids[row, place], parents[row, place], lens[row] = token, parent, place + 1
        return DraftTree(ids, parents, lens, self.probs(ids.shape)) if lens.any() else None

    def probs(self, shape: tuple[int, ...]) -> FloatArray | None:
        """Return the stated probabilities ``[rows, k]``. None, unless a subclass states some."""
        return None


class RandomChains(Adversary):
    """Draft chains of random tokens and of random length."""

    def nodes(self, text: IntArray, limit: int) -> Nodes:
        """Return a chain."""
        return [(int(self.rng.integers(self.vocab_size)), i - 1) for i in range(self.rng.integers(0, limit + 1))]


class RandomTrees(Adversary):
    """Draft random tokens below random parents. Siblings may have the same token."""

    def nodes(self, text: IntArray, limit: int) -> Nodes:
        """Return a tree."""
        return [(int(self.rng.integers(self.vocab_size)), int(self.rng.integers(-1, i))) for i in range(limit)]


class Miscalibrated(RandomTrees):
    """State probabilities that are unrelated to the drafts: far too high, far too low, and higher for a child than for
    its parent."""

    def probs(self, shape: tuple[int, ...]) -> FloatArray:
        """Return random probabilities, some of them below any threshold."""
        return self.rng.choice(np.array([1.0, 0.3, 0.06, 0.001], np.float32), shape, p=[0.2, 0.3, 0.3, 0.2])


class AlwaysTheSame(Adversary):
    """Draft the same token again and again."""

    def nodes(self, text: IntArray, limit: int) -> Nodes:
        """Return a chain."""
        return [(1, i - 1) for i in range(limit)]


class AlwaysWrong(Adversary):
    """Draft the least likely token (see ``learn``). Without ``learn``, draft the text's last token."""

    def __init__(self, vocab_size: int, width: int = 5, seed: int = 0) -> None:
        super().__init__(vocab_size, width, seed)
        self._unlikely: Callable[[Sequence[int]], int] = lambda text: text[-1]

    def learn(self, unlikely: Callable[[Sequence[int]], int]) -> None:
        """Set ``unlikely``, which returns the least likely token after a text."""
        self._unlikely = unlikely

    def nodes(self, text: IntArray, limit: int) -> Nodes:
        """Return a chain."""
        path, drafts = text.tolist(), list[tuple[int, int]]()
        for i in range(limit):
            drafts.append((self._unlikely(path), i - 1))
            path.append(drafts[-1][0])
        return drafts


class NoDrafts(Adversary):
    """Draft nothing, and return a tree without nodes."""

    def nodes(self, text: IntArray, limit: int) -> Nodes:
        """Return no drafts."""
        return []

    def propose(self, batch: Batch) -> DraftTree | None:
        """Return a tree without nodes, where None would be usual."""
        shape = len(batch.slots), self._width
        return DraftTree(np.zeros(shape, np.int32), np.full(shape, -1, np.int32), np.zeros(len(batch.slots), np.int32))


ADVERSARIES: Mapping[str, type[Adversary]] = {
    "random": RandomChains,
    "always wrong": AlwaysWrong,
    "always the same": AlwaysTheSame,
    "zero drafts": NoDrafts,
    "random trees": RandomTrees,
    "miscalibrated": Miscalibrated,
}
"""All of these drafters by name."""
