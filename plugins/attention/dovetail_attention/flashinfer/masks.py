"""Make the flat masks of FlashInfer for the queries of draft trees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dovetail.ops.transfer import to_device

if TYPE_CHECKING:
    from dovetail.types import Batch


def tree_mask(batch: Batch, rows: slice, tokens: slice, window: int | None) -> torch.Tensor:
    """Return the mask of ``rows``, whose queries are ``tokens``: bool ``[sum of queries * keys]``, ``[queries, keys]``
    of each row.

    Earlier keys are seen as usual; of the row's own queries, those that ``batch.tree_mask`` allows. A window counts
    depths.
    """
    assert batch.tree_mask is not None
    device = batch.page_table.device
    queries, prefix = batch.extend_lens[rows], batch.prefix_lens[rows]
    keys = np.repeat(prefix + queries, queries)  # the number of keys of each query
    firsts = np.repeat(np.cumsum(queries) - queries, queries)  # the first query of the same row
    starts = np.cumsum(keys) - keys
    columns = np.stack([keys, starts, np.repeat(prefix, queries), firsts]).astype(np.int64)
    on_device = to_device(columns, device)
    total = int(keys.sum())
    query = torch.repeat_interleave(on_device[0], output_size=total)
    start, past, first = on_device[1:].index_select(1, query)
    key = torch.arange(total, device=device) - start
    own = (key - past).clamp_(min=0)
    allowed, positions = batch.tree_mask[tokens], batch.positions[tokens]
    seen = (key < past) | allowed[query, own]
    if window is not None:
        depth = torch.where(key < past, key, positions[first + own])
        seen &= depth > positions[query] - window
    return seen
