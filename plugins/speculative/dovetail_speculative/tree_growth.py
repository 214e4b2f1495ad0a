"""Grow draft trees level by level, the most probable nodes first (EAGLE-2, arXiv 2406.16858).

A level consists of candidates: ``topk`` children of each of ``topk`` nodes of the level above. The ``topk`` most
probable candidates, given their ancestors, are expanded next. In the end the best candidates of all levels are the
draft. Because a child is never more probable than its parent, they form a tree.

All of this runs on the device, in tensors whose shapes depend on the number of rows only. Row r may be narrower: it has
``widths[r] <= topk`` nodes per level. Its expanded nodes are then closer together: node i of level l is at
``widths[r] * l + i``. Nodes of the ranks that the row does not have are also written, behind the level, and the next
level overwrites them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from dovetail.interfaces.speculative import DraftPass, DraftSteps

if TYPE_CHECKING:
    from dovetail.types import Batch, IntArray
    from dovetail_speculative.config import TreeShape

Children = tuple[torch.Tensor, torch.Tensor]
"""The most likely tokens after each of ``n`` nodes, best first, and the logarithms of their probabilities: int64 and
float32 ``[n, topk]``."""


class Trees(NamedTuple):
    """Hold the trees of several rows. All tensors are int64 unless another dtype is given.

    ``nodes`` is the largest number of expanded nodes of a row, and ``candidates`` the largest number of candidates. A
    candidate has a token, the logarithm of its probability given the text (minus infinity: the candidate does not
    exist), and its parent among the candidates (-1: the text's last token).
    """

    hidden: torch.Tensor  # [rows, nodes, hidden_size] what the model continues from, for each expanded node
    tokens: torch.Tensor  # [rows, nodes]
    seen: torch.Tensor  # bool [rows, nodes, nodes] whether a node is the other node or descends from it
    newest: torch.Tensor  # [rows, topk] the candidates that are the nodes of the last level
    ids: torch.Tensor  # [rows, candidates]
    scores: torch.Tensor  # float32 [rows, candidates]
    parents: torch.Tensor  # [rows, candidates]
    widths: torch.Tensor  # [rows]
    depths: torch.Tensor  # [rows] the number of levels of the row


class TreeSteps(DraftSteps):
    """Grow trees. Pass l finds the children of the nodes of level l; its ``kind`` is l - 1, an index into ``widths``.

    The model runs on all expanded nodes of a row in every pass. A tree mask hides tokens of the same pass only: if nodes
    of the levels above were not in the pass, every node would see all of them.
    """

    def __init__(
        self,
        shape: TreeShape,
        step: Callable[[Batch, torch.Tensor, torch.Tensor], torch.Tensor],
        best: Callable[[torch.Tensor], Children],
        zeros: Callable[[int], torch.Tensor],
    ) -> None:
        """Build the steps.

        ``step(batch, ids, hidden)`` runs the model: it returns the outputs ``[tokens, hidden_size]`` for tokens (int64
        ``[tokens]``) and the outputs of their parents. ``best`` returns the children that an output
        ``[n, hidden_size]`` predicts. ``zeros(n)`` returns ``n`` outputs that are zero.
        """
        self.shape = shape
        self.widths = tuple(shape.topk * level for level in range(1, shape.depth)) or (1,)
        self._step, self._best, self._zeros = step, best, zeros

    @property
    def candidates(self) -> int:
        """Return the largest number of candidates of a row."""
        return self.shape.topk + self.shape.topk**2 * (self.shape.depth - 1)

    def state(self, rows: int) -> Trees:
        """Return trees in which every node sees itself. See ``DraftSteps.state``."""
        nodes = self.widths[-1]
        hidden = self._zeros(rows * nodes).unflatten(0, (rows, nodes))
        device = hidden.device
        numbers = torch.zeros(rows, 2 * self.candidates + nodes + self.shape.topk + 2, dtype=torch.int64, device=device)
        ids, parents, tokens, newest, widths, depths = numbers.split(
            [self.candidates, self.candidates, nodes, self.shape.topk, 1, 1], 1
        )
        seen = torch.eye(nodes, dtype=torch.bool, device=device).repeat(rows, 1, 1)
        scores = torch.full((rows, self.candidates), -torch.inf, device=device)
        return Trees(hidden, tokens, seen, newest, ids, scores, parents, widths[:, 0], depths[:, 0])

    def mask(self, state: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """See ``DraftSteps.mask``."""
        return Trees(*state).seen

    def begin(self, outputs: torch.Tensor, widths: torch.Tensor, depths: torch.Tensor) -> Trees:
        """Return trees of one level: the children of the texts' last tokens, whose outputs are
        ``outputs [rows, hidden_size]``."""
        topk, trees = self.shape.topk, self.state(len(outputs))
        ids, scores = self._best(outputs)
        ranks = torch.arange(topk, device=outputs.device)
        trees.ids[:, :topk], trees.parents[:] = ids, -1
        trees.scores[:, :topk] = scores.masked_fill(ranks >= widths[:, None], -torch.inf)
        trees.newest[:] = ranks
        nodes = min(topk, trees.tokens.shape[1])  # with one level, no node is expanded
        trees.tokens[:, :nodes] = ids[:, :nodes]
        trees.hidden[:, :nodes] = outputs[:, None]
        trees.widths[:], trees.depths[:] = widths, depths
        return trees

    def passes(self, starts: IntArray, widths: IntArray, depths: IntArray) -> list[DraftPass]:
        """Return the passes that grow trees at indices ``starts``, for rows ordered from the deepest tree to the
        shallowest."""
        return [
            DraftPass(level, starts, counts, np.repeat(starts, counts) + depth)
            for level, (counts, depth) in enumerate(_levels(tuple(widths.tolist()), tuple(depths.tolist())))
        ]

    def run(self, kind: int, batch: Batch, tokens: torch.Tensor, state: tuple[torch.Tensor, ...]) -> None:
        """See ``DraftSteps.run``."""
        trees, topk = Trees(*state), self.shape.topk
        rows, level = len(trees.widths), kind + 1
        found = self._step(
            batch, trees.tokens.flatten().index_select(0, tokens), trees.hidden.flatten(0, 1).index_select(0, tokens)
        )
        ranks = torch.arange(topk, device=found.device).minimum(trees.widths[:, None] - 1)
        ends = batch.qo_indptr[1 : rows + 1, None] - trees.widths[:, None]
        newest = found.index_select(0, (ends + ranks).clamp(0, len(found) - 1).flatten())
        ids, scores = self._best(newest)
        parents = self.grow(trees, level, ids.view(rows, topk, topk), scores.view(rows, topk, topk))
        if level + 1 < self.shape.depth:
            self.expand(trees, level, parents, newest.view(rows, topk, -1))

    def grow(self, trees: Trees, level: int, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Add the children of the newest nodes. Mutates ``trees`` and returns the ranks of the parents of the new
        level, ``[rows, topk]``.

        ``ids`` and ``scores`` (``[rows, topk, topk]``) are tokens and logarithms of probabilities given the parents.
        The best of the children become the newest nodes.
        """
        topk = self.shape.topk
        used = topk + topk * topk * (level - 1)
        added = slice(used, used + topk * topk)
        ranks = torch.arange(topk, device=ids.device) < trees.widths[:, None]
        there = ranks[:, :, None] & ranks[:, None, :] & (trees.depths > level)[:, None, None]
        total = trees.scores.gather(1, trees.newest)[:, :, None] + scores
        total = total.masked_fill(~there, -torch.inf).flatten(1)
        trees.ids[:, added], trees.scores[:, added] = ids.flatten(1), total
        trees.parents[:, added] = trees.newest.repeat_interleave(topk, 1)
        best = torch.sort(total, stable=True, dim=1, descending=True).indices[:, :topk]
        trees.newest.copy_(best + used)
        return best // topk

    def expand(self, trees: Trees, level: int, parents: torch.Tensor, outputs: torch.Tensor) -> None:
        """Write the newest candidates to ``trees`` as nodes of ``level``.

        ``parents`` are the ranks of their parents in the level above, whose outputs are
        ``outputs [rows, topk, hidden_size]``.
        """
        first = (trees.widths * level)[:, None]
        own = first + torch.arange(self.shape.topk, device=first.device)
        above = (first - trees.widths[:, None] + parents).clamp_(min=0)
        nodes = trees.seen.shape[2]
        seen = trees.seen.gather(1, above[:, :, None].expand(-1, -1, nodes)).scatter_(2, own[:, :, None], True)
        trees.seen.scatter_(1, own[:, :, None].expand(-1, -1, nodes), seen)
        trees.tokens.scatter_(1, own, trees.ids.gather(1, trees.newest))
        wide = (-1, -1, outputs.shape[2])
        entering = outputs.gather(1, parents[:, :, None].expand(wide))
        trees.hidden.scatter_(1, own[:, :, None].expand(wide), entering)


@functools.lru_cache(64)
def _levels(widths: tuple[int, ...], depths: tuple[int, ...]) -> list[tuple[IntArray, IntArray]]:
    """Return for each pass the number of nodes of each row (int32 ``[rows]``) and the depth of each node (int32
    ``[nodes]``).

    The results are cached, because most rows have a limit that allows a whole tree.
    """
    found: list[tuple[IntArray, IntArray]] = []
    of_rows = np.array(widths, np.int32)
    for level in range(1, max(depths)):
        counts = np.where(np.array(depths) > level, of_rows * level, 0).astype(np.int32)
        own = np.repeat(of_rows, counts)
        nth = np.arange(len(own)) - np.repeat(np.cumsum(counts) - counts, counts)
        found.append((counts, (nth // own).astype(np.int32)))
    return found


def best_of(trees: Trees, counts: torch.Tensor, most: int) -> torch.Tensor:
    """Return the ``counts [rows]`` best candidates of each row as a tree; at most ``most``, and all if there are fewer.

    The result is int64 ``[rows, 1 + 3 * most]``: the number of candidates, their tokens, their parents, and the bits of
    their probabilities (float32). Of equal candidates the first is taken, so that the parent of every node is in the
    tree.
    """
    width, there_are = trees.scores.shape[1], trees.scores.isfinite()
    scores = trees.scores.masked_fill(~there_are, -torch.inf)  # otherwise NaN would be the best score
    lens = torch.minimum(counts, there_are.sum(1))
    place = torch.arange(most, device=lens.device)
    ranked = torch.sort(scores, stable=True, dim=1, descending=True).indices[:, :most]
    kept = ranked.masked_fill(place >= lens[:, None], width).sort(1).values
    there = torch.full((len(lens), width + 1), -1, device=lens.device)
    there.scatter_(1, kept, place.expand_as(kept))
    there[:, width] = -1  # the entry for no node: beyond a row's draft, and for the text's last token
    own = kept.clamp(max=width - 1)
    parents = trees.parents.gather(1, own)
    parents = there.gather(1, parents.masked_fill(parents < 0, width))
    bits = scores.gather(1, own).exp_().view(torch.int32).long()
    return torch.cat((lens[:, None], trees.ids.gather(1, own), parents, bits), 1)
