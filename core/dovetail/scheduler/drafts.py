"""Drafts from outside are checked before pages are trusted to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dovetail.types import DraftTree

if TYPE_CHECKING:
    from dovetail.types import Batch


def checked(batch: Batch, drafts: DraftTree, vocab_size: int) -> DraftTree | None:
    """``drafts`` as wide as the longest row, with 0 and -1 where a row has no draft; None if no row has one.

    Raises ``ValueError`` for what the contract of ``Drafter.propose`` excludes.
    """
    rows, room = len(batch.reqs), batch.draft_room
    lens, ids, parents = drafts.lens, drafts.token_ids, drafts.parents
    assert room is not None, "pages were reserved for no drafts"
    if lens.shape != (rows,) or ids.ndim != 2 or ids.shape != parents.shape or len(ids) != rows:
        raise ValueError(
            f"a draft tree of {rows} rows has lens {lens.shape}, token_ids {ids.shape}, parents {parents.shape}; "
            "allowed: [rows], and [rows, k] twice"
        )
    counts = lens.tolist()
    lowest, longest = min(counts), max(counts)
    if lowest < 0 or longest > ids.shape[1] or True in (lens > room).tolist():
        raise ValueError(f"draft lens are {counts}; allowed: up to {room.tolist()}, of k = {ids.shape[1]}")
    if longest == 0:
        return None
    ids = ids[:, :longest]
    valid = None if lowest == longest else np.arange(longest) < lens[:, None]
    if valid is not None:
        ids = np.where(valid, ids, 0)
    if ids.astype(np.uint64).max() >= vocab_size:  # a negative one is large too
        raise ValueError(f"draft tokens range from {ids.min()} to {ids.max()}; allowed: 0 to {vocab_size - 1}")
    ids, lens = ids.astype(np.int32, copy=False), lens.astype(np.int32, copy=False)
    if drafts.is_chain:
        # with parents of its own: the drafter's were looked at when this was asked first, and may have changed since
        return DraftTree.chains(ids, lens)
    parents = parents[:, :longest]
    if valid is not None:
        parents = np.where(valid, parents, -1)
    if parents.min() < -1 or (parents >= np.arange(longest)).any():
        raise ValueError("a draft's parent comes after it; allowed: -1 (the row's last token) or an earlier draft")
    return DraftTree(ids, parents.astype(np.int32), lens)
