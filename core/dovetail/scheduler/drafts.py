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
    lowest, longest = int(lens.min()), int(lens.max())
    if lowest < 0 or (lens > room).any() or longest > ids.shape[1]:
        raise ValueError(f"draft lens are {lens.tolist()}; allowed: up to {room.tolist()}, of k = {ids.shape[1]}")
    if longest == 0:
        return None
    place = np.arange(longest)
    ids, parents = ids[:, :longest], parents[:, :longest]
    if lowest < longest:
        valid = place < lens[:, None]
        ids, parents = np.where(valid, ids, 0), np.where(valid, parents, -1)
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(f"draft tokens range from {ids.min()} to {ids.max()}; allowed: 0 to {vocab_size - 1}")
    if parents.min() < -1 or (parents >= place).any():
        raise ValueError("a draft's parent comes after it; allowed: -1 (the row's last token) or an earlier draft")
    int32 = np.int32
    return DraftTree(ids.astype(int32), parents.astype(int32), lens.astype(int32), drafts.probs)
