"""Verify drafts. The result is exact for any drafter.

The target samples a token at every node of the draft tree, with the request's own parameters and random numbers; at
node i it samples x_i from p(. | path to node i). A walk through the tree starts at the root, which is the last token of
the request. From a node whose sample is x, the walk goes on to the child whose draft token is x. If there is no such
child, the walk ends. The new tokens are the samples at the nodes of the walk. Each is a sample of p given the tokens
before it, so the output has the same distribution as without drafts. With a fixed seed it is the same output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from dovetail.engine.grouped import pools_of
from dovetail.engine.own_rows import kept
from dovetail.interfaces.mesh import SINGLE

if TYPE_CHECKING:
    from dovetail.engine.grouped import Pools
    from dovetail.interfaces.mesh import Mesh
    from dovetail.types import Batch, ForwardOutput


class Accepted(NamedTuple):
    """Hold the result of verification. ``tokens`` is int64 ``[rows, k + 1]``: the first ``lens[r]`` entries of row r
    are its new tokens, and the entries after them repeat the last one. ``nodes`` (int64 ``[rows, k + 1]``) are the tree
    nodes at which the tokens were sampled (0 is the root, j + 1 is draft j)."""

    tokens: torch.Tensor
    lens: torch.Tensor
    nodes: torch.Tensor

    @classmethod
    def of(cls, result: torch.Tensor) -> Accepted:
        """Return views of ``result`` ``[rows, 2k + 3]``, whose columns are the tokens, then the nodes, then the
        lens."""
        width = result.shape[1] // 2
        return cls(result[:, :width], result[:, -1], result[:, width:-1])


def accept(
    sampled: torch.Tensor, indptr: torch.Tensor, draft_ids: torch.Tensor, parents: torch.Tensor | None
) -> Accepted:
    """Walk the trees and return what is accepted. ``sampled`` (int64) has the target's samples at the root and at each
    draft: those of row r are ``[indptr[r], indptr[r + 1])``. ``draft_ids`` and ``parents`` ``[rows, k]`` are the
    drafts. Parent -1 is the root. If ``parents`` is None, the drafts are chains."""
    rows, width = draft_ids.shape
    if sampled.device.type == "cuda":
        from dovetail.ops.triton.verify import walk

        result = sampled.new_empty(rows, 2 * width + 3)
        walk(sampled, indptr, draft_ids, parents, result)
        return Accepted.of(result)
    starts, lens = indptr[:-1, None].long(), indptr.diff()[:, None] - 1
    path = (
        _down_chains(sampled, starts, draft_ids, lens)
        if parents is None
        else _down_trees(sampled, starts, draft_ids, parents, lens)
    )
    return Accepted(sampled[starts + path], 1 + (path.diff(dim=1) > 0).sum(1), path)


def _down_chains(
    sampled: torch.Tensor, starts: torch.Tensor, draft_ids: torch.Tensor, lens: torch.Tensor
) -> torch.Tensor:
    """Return the nodes of the walks, ``[rows, k + 1]``. After the end of a walk its last node is repeated."""
    places = torch.arange(draft_ids.shape[1] + 1, device=sampled.device)
    before, inside = places[:-1], places[:-1] < lens
    right = (sampled[starts + before.clamp(max=lens)] == draft_ids) & inside
    return places.minimum(right.cumprod(1).sum(1, keepdim=True))


def _down_trees(
    sampled: torch.Tensor, starts: torch.Tensor, draft_ids: torch.Tensor, parents: torch.Tensor, lens: torch.Tensor
) -> torch.Tensor:
    rows, width = draft_ids.shape
    valid = torch.arange(width, device=sampled.device) < lens
    node = torch.zeros(rows, 1, dtype=torch.int64, device=sampled.device)
    nodes, alive = [node], torch.ones_like(node, dtype=torch.bool)
    for _ in range(width):
        child = valid & (parents + 1 == node) & (draft_ids == sampled[starts + node]) & alive
        alive = child.any(dim=1, keepdim=True)
        node = torch.where(alive, child.int().argmax(dim=1, keepdim=True) + 1, node)
        nodes.append(node)
    return torch.cat(nodes, dim=1)


def compact(batch: Batch, output: ForwardOutput, pool: Pools, mesh: Mesh = SINGLE) -> None:
    """Move the K and V of accepted drafts in trees to the locations of their positions; with data-parallel attention, those of
    the rows that this rank of ``mesh`` keeps. Mutates ``pool``."""
    assert output.nodes is not None
    device = batch.out_loc.device
    sampled = np.flatnonzero(batch.samples)
    moving = np.flatnonzero(sampled >= batch.num_extend)
    if mesh.attention == "data":
        moving = moving[kept(batch.slots[sampled[moving]], mesh.tp)]
    verify = torch.from_numpy(moving).to(device)
    first = batch.qo_indptr[:-1].long()[torch.from_numpy(sampled).to(device)][verify]
    nodes = output.nodes[verify]
    step = torch.arange(nodes.shape[1], device=device)
    assert output.accept_lens is not None
    moved = (step < output.accept_lens[verify][:, None]) & (nodes != step)
    source, target = (first[:, None] + nodes)[moved], (first[:, None] + step)[moved]
    for group, own in enumerate(pools_of(pool)):
        out_loc = batch.view(group).out_loc
        own.copy(out_loc[source], out_loc[target])
