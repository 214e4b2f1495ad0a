"""Grammar bitmasks of a batch, along the drafts too."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dovetail.engine.penalties import draft_rows
from dovetail.ops.bitmask import apply_bitmask, bitmask_width
from dovetail.ops.transfer import to_device

if TYPE_CHECKING:
    import torch

    from dovetail.interfaces.grammar import Matcher
    from dovetail.types import Batch, IntArray, Req


log = logging.getLogger(__name__)


def mask_logits(logits: torch.Tensor, batch: Batch, constrained: Sequence[tuple[int, int, Req]]) -> None:
    """Forbid, in place, what the grammars forbid. ``constrained`` are (first logit row, batch row, request). A matcher that
    raises sets its request's ``error``; the other rows are masked as usual."""
    nodes = [(start, req, *draft_rows(batch.drafts, row)) for start, row, req in constrained]
    bitmask = np.zeros((sum(1 + len(drafts) for _, _, drafts, _ in nodes), bitmask_width(logits.shape[1])), np.int32)
    rows: list[int] = []
    for start, req, drafts, parents in nodes:
        part = bitmask[len(rows) : len(rows) + 1 + len(drafts)]
        try:
            _fill(req.matcher, part, drafts, parents)
        except Exception as error:
            log.exception("the grammar matcher of request %s failed", req.rid)
            req.error = f"the grammar matcher failed: {type(error).__name__}: {error}"
            part[:] = -1
        rows.extend(range(start, start + 1 + len(drafts)))
    device = logits.device
    apply_bitmask(logits, to_device(bitmask, device), to_device(np.array(rows, np.int64), device))


def _fill(matcher: Matcher, bitmask: IntArray, drafts: list[int], parents: list[int]) -> None:
    """Masks of the root and of every draft, by a walk down the tree; the matcher ends where it began.

    A node that the grammar forbids is never accepted, so its mask, and those below it, allow everything.
    """
    matcher.fill_bitmask(bitmask, 0)
    if not drafts:
        return
    bitmask[1:] = -1
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    _descend(matcher, bitmask, drafts, children, -1)


def _descend(
    matcher: Matcher, bitmask: IntArray, drafts: list[int], children: dict[int, list[int]], parent: int
) -> None:
    for node in children.get(parent, ()):
        if not matcher.accept(drafts[node]):
            continue
        if not matcher.is_terminated:
            matcher.fill_bitmask(bitmask, node + 1)
            _descend(matcher, bitmask, drafts, children, node)
        matcher.rollback(1)
