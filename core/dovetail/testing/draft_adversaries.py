"""Drafters that draft badly, each in its own way: whatever they say, outputs must be those of decoding without drafts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dovetail.interfaces.speculative import Drafter
from dovetail.types import Batch, DraftTree, FloatArray, Req

Nodes = Sequence[tuple[int, int]]
"""Drafts of one row: (token, parent), parents before their children, -1 for the row's last token."""


class Adversary(Drafter):
    """Asks ``nodes`` for the drafts of each row, and leaves junk where there are none."""

    def __init__(self, vocab_size: int, width: int = 5, seed: int = 0) -> None:
        """``width`` is the most nodes of a row."""
        self.vocab_size = vocab_size
        self.rng = np.random.default_rng(seed)
        self._width = width

    @property
    def max_draft_tokens(self) -> int:
        """The width given."""
        return self._width

    @abstractmethod
    def nodes(self, req: Req, limit: int) -> Nodes:
        """At most ``limit >= 1`` drafts for one row."""

    def propose(self, batch: Batch) -> DraftTree | None:
        """Drafts for the decode rows whose limit is positive."""
        assert batch.draft_limits is not None
        shape = len(batch.reqs), self._width
        ids = self.rng.integers(-9, 10**6, shape).astype(np.int32)
        parents = self.rng.integers(-9, 10**6, shape).astype(np.int32)
        lens = np.zeros(len(ids), np.int32)
        for row in range(batch.num_extend, len(ids)):
            limit = min(int(batch.draft_limits[row]), self._width)
            for place, (token, parent) in enumerate(self.nodes(batch.reqs[row], limit) if limit > 0 else ()):
                ids[row, place], parents[row, place], lens[row] = token, parent, place + 1
        return DraftTree(ids, parents, lens, self.probs(ids.shape)) if lens.any() else None

    def probs(self, shape: tuple[int, ...]) -> FloatArray | None:
        """What it says of its drafts, ``[rows, k]``. Nothing, unless a subclass does."""
        return None


class RandomChains(Adversary):
    """Any tokens, any number of them."""

    def nodes(self, req: Req, limit: int) -> Nodes:
        """A chain."""
        return [(int(self.rng.integers(self.vocab_size)), i - 1) for i in range(self.rng.integers(0, limit + 1))]


class RandomTrees(Adversary):
    """Any tokens below any parents; siblings may say the same."""

    def nodes(self, req: Req, limit: int) -> Nodes:
        """A tree."""
        return [(int(self.rng.integers(self.vocab_size)), int(self.rng.integers(-1, i))) for i in range(limit)]


class Miscalibrated(RandomTrees):
    """States probabilities that have nothing to do with its drafts: far too high ones, far too low ones, of a child more than of
    its parent."""

    def probs(self, shape: tuple[int, ...]) -> FloatArray:
        """Some below any threshold."""
        return self.rng.choice(np.array([1.0, 0.3, 0.06, 0.001], np.float32), shape, p=[0.2, 0.3, 0.3, 0.2])


class AlwaysTheSame(Adversary):
    """The same token again and again."""

    def nodes(self, req: Req, limit: int) -> Nodes:
        """A chain."""
        return [(1, i - 1) for i in range(limit)]


class AlwaysWrong(Adversary):
    """The last token that the model would choose: see ``learn``. Without it, the text's own last token."""

    def __init__(self, vocab_size: int, width: int = 5, seed: int = 0) -> None:
        super().__init__(vocab_size, width, seed)
        self._unlikely: Callable[[Sequence[int]], int] = lambda text: text[-1]

    def learn(self, unlikely: Callable[[Sequence[int]], int]) -> None:
        """``unlikely`` tells the least likely token after a text."""
        self._unlikely = unlikely

    def nodes(self, req: Req, limit: int) -> Nodes:
        """A chain."""
        text, drafts = req.token_ids[: req.known_len].tolist(), list[tuple[int, int]]()
        for i in range(limit):
            drafts.append((self._unlikely(text), i - 1))
            text.append(drafts[-1][0])
        return drafts


class NoDrafts(Adversary):
    """Nothing, which it says with a tree of no nodes."""

    def nodes(self, req: Req, limit: int) -> Nodes:
        """None."""
        return []

    def propose(self, batch: Batch) -> DraftTree | None:
        """A tree without nodes, where None would do."""
        shape = len(batch.reqs), self._width
        return DraftTree(np.zeros(shape, np.int32), np.full(shape, -1, np.int32), np.zeros(len(batch.reqs), np.int32))


ADVERSARIES: Mapping[str, type[Adversary]] = {
    "random": RandomChains,
    "always wrong": AlwaysWrong,
    "always the same": AlwaysTheSame,
    "zero drafts": NoDrafts,
    "random trees": RandomTrees,
    "miscalibrated": Miscalibrated,
}
"""All of them."""
