"""Growing draft trees level by level, the most probable nodes first (EAGLE-2, arXiv 2406.16858).

A level has the children of ``topk`` nodes of the level above, ``topk`` each: candidates. Of these the ``topk`` most probable,
given their ancestors, are expanded next. In the end the best candidates of all levels are the draft: as a child is never
more probable than its parent, they hang together.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dovetail.types import BoolArray, DraftTree, IntArray

FloatArray = np.ndarray[Any, np.dtype[np.float32]]


class TreeGrowth:
    """Candidates of several rows, level by level, on the host. Rows that stop growing are the last ones.

    A candidate has a token, the logarithm of its probability given the text, and its parent among the candidates (-1: the
    text's last token). ``mask`` bool ``[growing rows, nodes, nodes]`` says which expanded node descends from which, or is it.
    """

    def __init__(self, ids: IntArray, scores: FloatArray, depth: int) -> None:
        """``ids [rows, topk]`` and ``scores`` are the first level, best first; there will be at most ``depth``."""
        rows, topk = ids.shape
        self.topk = topk
        width = topk + topk * topk * (depth - 1)
        self._ids = np.zeros((rows, width), np.int32)
        self._scores = np.full((rows, width), -np.inf, np.float32)
        self._parents = np.full((rows, width), -1, np.int32)
        self._ids[:, :topk], self._scores[:, :topk] = ids, scores
        self._used = topk
        self._expanded = np.tile(np.arange(topk, dtype=np.int32), (rows, 1))  # candidates, level by level
        self.mask: BoolArray = np.tile(np.eye(topk, dtype=np.bool_), (rows, 1, 1))

    def keep(self, rows: int) -> None:
        """Only the first ``rows`` go on."""
        self._expanded, self.mask = self._expanded[:rows], self.mask[:rows]

    @property
    def tokens(self) -> IntArray:
        """Tokens of the expanded nodes, ``[growing rows, nodes]``, the newest ``topk`` last."""
        return np.take_along_axis(self._ids[: len(self._expanded)], self._expanded, 1)

    def grow(self, ids: IntArray, scores: FloatArray) -> IntArray:
        """Add the children of the newest nodes: ``ids [growing rows, topk, topk]`` with the logarithms of their probabilities
        given their parents. Returns which of the newest nodes are parents of those expanded next, ``[growing rows, topk]``."""
        topk, rows = self.topk, len(self._expanded)
        level = slice(self._used, self._used + topk * topk)
        newest = self._expanded[:, -topk:]
        total = (np.take_along_axis(self._scores[:rows], newest, 1)[:, :, None] + scores).reshape(rows, -1)
        self._ids[:rows, level], self._scores[:rows, level] = ids.reshape(rows, -1), total
        self._parents[:rows, level] = np.repeat(newest, topk, axis=1)
        best = np.argsort(-total, axis=1, kind="stable")[:, :topk].astype(np.int32)
        self._expanded = np.concatenate([self._expanded, self._used + best], axis=1)
        self._used = level.stop
        self._extend_mask(best // topk)
        return best // topk

    def _extend_mask(self, parents: IntArray) -> None:
        rows, before, _ = self.mask.shape
        mask = np.zeros((rows, before + self.topk, before + self.topk), np.bool_)
        mask[:, :before, :before] = self.mask
        mask[:, before:, :before] = np.take_along_axis(self.mask[:, -self.topk :], parents[:, :, None], 1)
        mask[:, before:, before:] = np.eye(self.topk, dtype=np.bool_)
        self.mask = mask

    def best(self, counts: IntArray) -> DraftTree:
        """The ``counts [rows]`` best candidates of each row, or as many as there are, as a tree. Of equals the first stays, so
        that no node is without its parent."""
        rows, width = self._scores.shape
        lens = np.minimum(counts, np.isfinite(self._scores).sum(1)).astype(np.int32)
        most = int(lens.max())
        ranked = np.argsort(-self._scores, axis=1, kind="stable")[:, :most]
        kept = np.sort(np.where(np.arange(most) < lens[:, None], ranked, width), axis=1)
        there = np.full((rows, width + 1), -1, np.int32)
        np.put_along_axis(there, kept, np.arange(most, dtype=np.int32)[None], 1)
        there[:, width] = -1  # stands for no node: beyond a row's draft, and for the text's last token
        own = np.minimum(kept, width - 1)
        parents = np.take_along_axis(self._parents, own, 1)
        return DraftTree(
            np.take_along_axis(self._ids, own, 1),
            np.take_along_axis(there, np.where(parents < 0, width, parents), 1),
            lens,
        )
