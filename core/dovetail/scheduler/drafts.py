"""Check the drafts of a drafter before they enter a step, and prune drafts of low probability."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dovetail.types import DraftTree

if TYPE_CHECKING:
    from dovetail.types import BoolArray, FloatArray, StepPlan


def within_declared(plan: StepPlan, drafts: DraftTree, *, trees: bool) -> tuple[DraftTree, str]:
    """Return ``drafts`` cut to what the drafter has declared, and a text about what was cut ("" for nothing).

    A row keeps its first drafts, up to its limit. Without ``trees`` it keeps them up to the first one that does not
    follow the draft before it. Raises ``ValueError`` for arrays of wrong shapes.
    """
    rows, limits = len(plan.slots), plan.draft_limits
    lens, ids, parents = drafts.lens, drafts.token_ids, drafts.parents
    assert limits is not None, "no pages were reserved for drafts"
    if lens.shape != (rows,) or ids.ndim != 2 or ids.shape != parents.shape or len(ids) != rows:
        raise ValueError(
            f"a draft tree of {rows} rows has lens {lens.shape}, token_ids {ids.shape}, parents {parents.shape}; "
            "allowed: [rows], and [rows, k] twice"
        )
    counts = lens.tolist()
    if counts and (min(counts) < 0 or max(counts) > ids.shape[1]):
        raise ValueError(f"draft lens are {counts}; allowed: 0 to k = {ids.shape[1]}")
    kept, excess = lens, []
    if True in (lens > limits).tolist():
        kept = np.minimum(lens, limits)
        excess.append(f"drafts of {counts} tokens for rows whose limits are {limits.tolist()}")
    if not trees and not drafts.is_chain:
        follows = parents == np.arange(-1, parents.shape[1] - 1)
        kept = np.minimum(kept, np.logical_and.accumulate(follows, axis=1).sum(1, dtype=np.int32))
        excess.append("draft trees, and it offers draft.chain only")
    if not excess:
        return drafts, ""
    return DraftTree(ids, parents, kept.astype(np.int32), drafts.probs), "; ".join(excess)


def checked(plan: StepPlan, drafts: DraftTree, vocab_size: int, min_probability: float = 0.0) -> DraftTree | None:
    """Return ``drafts``, which are ``within_declared``, cut to the width of the longest row, without ``probs``; None if
    no row has a draft.

    Drafts below ``min_probability`` are left out together with their descendants. Entries beyond the length of a row
    have token 0 and a parent that comes before them. Raises ``ValueError`` for drafts that break the contract of
    ``Drafter.propose``.
    """
    lens, ids, parents = drafts.lens, drafts.token_ids, drafts.parents
    counts = lens.tolist()
    lowest, longest = min(counts), max(counts)
    if longest == 0:
        return None
    ids = ids[:, :longest]
    valid = None if lowest == longest else np.arange(longest) < lens[:, None]
    if valid is not None:
        ids = np.where(valid, ids, 0)
    if ids.astype(np.uint64).max() >= vocab_size:  # a negative id is large too
        raise ValueError(f"draft tokens range from {ids.min()} to {ids.max()}; allowed: 0 to {vocab_size - 1}")
    ids, lens = ids.astype(np.int32, copy=False), lens.astype(np.int32, copy=False)
    probs = _checked_probs(drafts, longest, valid) if min_probability > 0 else None
    if drafts.is_chain:
        # make new parents: the drafter may have changed its array after the first read of is_chain
        return _pruned(DraftTree.chains(ids, lens), probs, min_probability)
    parents = parents[:, :longest]
    if valid is not None:
        parents = np.where(valid, parents, -1)
    if parents.min() < -1 or (parents >= np.arange(longest)).any():
        raise ValueError("a draft's parent comes after it; allowed: -1 (the row's last token) or an earlier draft")
    return _pruned(DraftTree(ids, parents.astype(np.int32), lens), probs, min_probability)


def _checked_probs(drafts: DraftTree, longest: int, valid: BoolArray | None) -> FloatArray:
    """Return the probabilities of ``drafts``, 0 where a row has no draft. Raises ``ValueError`` if they are missing or
    wrong."""
    probs = drafts.probs
    if probs is None:
        raise ValueError("drafts have no probs, which scheduler.min_draft_probability needs")
    probs = np.asarray(probs, np.float32)
    if probs.shape != drafts.token_ids.shape:
        raise ValueError(
            f"draft probs have shape {probs.shape}; allowed: the shape of token_ids, {drafts.token_ids.shape}"
        )
    probs = probs[:, :longest]
    if valid is not None:
        probs = np.where(valid, probs, np.float32(0))
    if not ((probs >= 0) & (probs <= 1)).all():  # NaN is neither
        raise ValueError(f"draft probs range from {probs.min()} to {probs.max()}; allowed: 0 to 1")
    return probs


def _pruned(tree: DraftTree, probs: FloatArray | None, min_probability: float) -> DraftTree | None:
    """Return ``tree`` without the drafts below ``min_probability`` and without their descendants; None if nothing is
    left."""
    if probs is None:
        return tree
    kept = (probs >= min_probability) & (np.arange(probs.shape[1]) < tree.lens[:, None])
    first, above = tree.parents < 0, np.maximum(tree.parents, 0)
    while (orphans := kept & ~first & ~np.take_along_axis(kept, above, 1)).any():
        kept &= ~orphans  # a draft may have a higher probability than its parent; without its parent it is dropped
    lens = kept.sum(1, dtype=np.int32)
    if (lens == tree.lens).all():
        return tree
    longest = int(lens.max())
    if longest == 0:
        return None
    order = np.argsort(~kept, axis=1, kind="stable")[:, :longest]
    valid = np.arange(longest) < lens[:, None]
    renumbered = np.where(first, -1, np.take_along_axis(np.cumsum(kept, 1) - 1, above, 1))
    ids = np.where(valid, np.take_along_axis(tree.token_ids, order, 1), 0)
    parents = np.where(valid, np.take_along_axis(renumbered, order, 1), -1)
    return DraftTree(ids.astype(np.int32), parents.astype(np.int32), lens)
