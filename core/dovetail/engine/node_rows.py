"""Turn each node of a draft tree into a separate row, for attention that must give a token the same bits in every step.

With a tree mask, there are gaps between the keys that a node sees, so they are summed in another order than in a decode
step. The row of a node therefore has the pages of its past, followed by the pages of its ancestors without gaps, as in
a decode step after these were accepted. This requires pages of one token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dovetail.engine.captures import NO_UPDATES
from dovetail.engine.inputs import tree_mask
from dovetail.ops.transfer import to_device
from dovetail.types import Attends, Batch

if TYPE_CHECKING:
    import torch

    from dovetail.interfaces.attention import AttentionBackend, AttentionLayer


def node_rows(batch: Batch) -> Batch:
    """Return a batch of the same tokens as ``batch``, which is prepared and has trees. Its rows are the extend rows,
    and then a decode row for each node. Pages must have one token. Does not mutate ``batch``."""
    split, rows = batch.num_extend, len(batch.slots)
    indptr = np.zeros(rows + 1, np.int32)
    np.cumsum(batch.extend_lens, out=indptr[1:])
    sees = tree_mask(batch, indptr)[indptr[split] :]
    node, seen = np.nonzero(sees)  # for each node, its ancestors in the order of their depth, then itself
    depths = sees.sum(axis=1)
    depth = np.arange(len(node)) - np.repeat(np.cumsum(depths) - depths, depths)
    row_of = np.concatenate([np.arange(split), np.repeat(np.arange(split, rows), batch.extend_lens[split:])])
    of_nodes = row_of[split:]
    prefix = batch.prefix_lens[of_nodes]
    found = Batch(
        reqs=(),
        num_extend=split,
        slots=batch.slots[row_of],
        prefix_lens=np.concatenate([batch.prefix_lens[:split], prefix + depths - 1]).astype(np.int32),
        extend_lens=np.concatenate([batch.extend_lens[:split], np.ones_like(of_nodes)]).astype(np.int32),
        samples=np.ones(len(row_of), np.bool_),
        page_updates=NO_UPDATES,
    )
    starts = np.concatenate([indptr[:split], np.arange(indptr[split], indptr[-1] + 1)]).astype(np.int32)
    lens = found.prefix_lens + found.extend_lens
    places = np.stack([split + node, prefix[node] + depth, of_nodes[node], prefix[node] + seen])
    device = batch.positions.device
    found.qo_indptr, found.kv_lens = to_device(starts, device), to_device(lens, device)
    to_row, to_column, row, column = to_device(places.astype(np.int64), device)
    found.page_table = batch.page_table.index_select(0, to_device(row_of.astype(np.int64), device))
    found.page_table[to_row, to_column] = batch.page_table[row, column]
    found.input_ids, found.positions, found.out_loc = batch.input_ids, batch.positions, batch.out_loc
    return found


class NodeRows(Attends):
    """Attend in a batch with trees, with a backend that is planned for the batch's ``node_rows``."""

    def __init__(self, backend: AttentionBackend, batch: Batch) -> None:
        self._backend, self._rows = backend, node_rows(batch)
        backend.plan(self._rows)

    def forward(self, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        """See ``AttentionBackend.forward``. ``batch`` must be the batch that was given to the constructor."""
        return self._backend.forward(q, layer, self._rows)
