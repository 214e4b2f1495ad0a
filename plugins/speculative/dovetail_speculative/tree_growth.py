"""Growing draft trees level by level, the most probable nodes first (EAGLE-2, arXiv 2406.16858).

A level has the children of ``topk`` nodes of the level above, ``topk`` each: candidates. Of these the ``topk`` most probable,
given their ancestors, are expanded next. In the end the best candidates of all levels are the draft: as a child is never
more probable than its parent, they hang together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dovetail.types import BoolArray, DraftTree, IntArray

FloatArray = np.ndarray[Any, np.dtype[np.float32]]


class Nodes(NamedTuple):
    """Expanded nodes of growing rows, row by row, level by level: what a model runs on to find their children. ``counts [rows]``
    of each row; of each node its token, its ``level`` from 0, its ``place`` in ``[rows, topk * levels]``, and in ``mask [nodes, most of a
    row]`` which of its row's nodes it descends from, or is. ``newest [rows, topk]`` are those of the last level among all; rows
    that are narrower repeat one."""

    counts: IntArray
    tokens: IntArray
    level: IntArray
    place: IntArray
    mask: BoolArray
    newest: IntArray


class TreeGrowth:
    """Candidates of several rows, level by level, on the host. Rows that stop growing are the last ones.

    A candidate has a token, the logarithm of its probability given the text (minus infinity: there is none, its row is
    narrower), and its parent among the candidates (-1: the text's last token).
    """

    def __init__(self, ids: IntArray, scores: FloatArray, widths: IntArray, depth: int) -> None:
        """``ids [rows, topk]`` and ``scores`` are the first level, best first; there will be at most ``depth``. Row r has the
        first ``widths[r]`` of them, as many children of each, and as many nodes that get children."""
        rows, topk = ids.shape
        self._topk, self._levels = topk, 1
        self._ranks = np.arange(topk) < widths[:, None]
        width = topk + topk * topk * (depth - 1)
        self._ids = np.zeros((rows, width), np.int32)
        self._scores = np.full((rows, width), -np.inf, np.float32)
        self._parents = np.full((rows, width), -1, np.int32)
        self._ids[:, :topk], self._scores[:, :topk] = ids, np.where(self._ranks, scores, -np.inf)
        self._expanded = np.tile(np.arange(topk, dtype=np.int32), (rows, 1))  # candidates, level by level
        self._mask: BoolArray = np.tile(np.eye(topk, dtype=np.bool_), (rows, 1, 1))  # who descends from whom

    def keep(self, rows: int) -> None:
        """Only the first ``rows`` go on."""
        self._expanded, self._mask, self._ranks = self._expanded[:rows], self._mask[:rows], self._ranks[:rows]

    @property
    def nodes(self) -> Nodes:
        """The expanded nodes."""
        there = np.tile(self._ranks, self._levels)
        order = np.argsort(~there, axis=1, kind="stable")  # where rows are narrower, they end sooner
        there = np.take_along_axis(there, order, 1)
        counts = there.sum(1).astype(np.int32)
        tokens = np.take_along_axis(self._ids[: len(order)], self._expanded, 1)
        mask = np.take_along_axis(np.take_along_axis(self._mask, order[:, :, None], 1), order[:, None, :], 2)
        ends = np.cumsum(counts)[:, None] - self._ranks.sum(1, keepdims=True)
        return Nodes(
            counts,
            np.take_along_axis(tokens, order, 1)[there],
            (order // self._topk)[there].astype(np.int32),
            (order + order.shape[1] * np.arange(len(order))[:, None])[there].astype(np.int32),
            mask[there][:, : int(counts.max())],
            np.where(self._ranks, ends + np.arange(self._topk), ends).astype(np.int32),
        )

    def grow(self, ids: IntArray, scores: FloatArray) -> IntArray:
        """Add the children of the newest nodes: ``ids [growing rows, topk, topk]`` with the logarithms of their probabilities
        given their parents. Returns which of the newest nodes are parents of those expanded next, ``[growing rows, topk]``."""
        topk, rows = self._topk, len(self._expanded)
        used = topk + topk * topk * (self._levels - 1)
        level = slice(used, used + topk * topk)
        newest = self._expanded[:, -topk:]
        total = np.take_along_axis(self._scores[:rows], newest, 1)[:, :, None] + scores
        total = np.where(self._ranks[:, :, None] & self._ranks[:, None, :], total, -np.inf).reshape(rows, -1)
        self._ids[:rows, level], self._scores[:rows, level] = ids.reshape(rows, -1), total
        self._parents[:rows, level] = np.repeat(newest, topk, axis=1)
        best = np.argsort(-total, axis=1, kind="stable")[:, :topk].astype(np.int32)
        self._expanded = np.concatenate([self._expanded, used + best], axis=1)
        self._levels += 1
        self._extend_mask(best // topk)
        return best // topk

    def _extend_mask(self, parents: IntArray) -> None:
        rows, before, _ = self._mask.shape
        mask = np.zeros((rows, before + self._topk, before + self._topk), np.bool_)
        mask[:, :before, :before] = self._mask
        mask[:, before:, :before] = np.take_along_axis(self._mask[:, -self._topk :], parents[:, :, None], 1)
        mask[:, before:, before:] = np.eye(self._topk, dtype=np.bool_)
        self._mask = mask

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
