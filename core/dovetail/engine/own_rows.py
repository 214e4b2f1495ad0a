"""Find the rows of a step whose requests this rank keeps, and prepare them for data-parallel attention (see
``layers.own_rows``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dovetail.engine.captures import NO_UPDATES
from dovetail.layers.own_rows import OwnRows
from dovetail.memory.table import pool_of
from dovetail.ops.transfer import to_device
from dovetail.types import Batch, DraftTree

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.engine.inputs import Inputs
    from dovetail.interfaces.mesh import Collectives, Mesh
    from dovetail.types import Int64Array, IntArray


class OwnRowsOfSteps:
    """Prepare the rows of this rank, one of ``tp``, for steps that are launched kernel by kernel."""

    def __init__(self, tp: Collectives, inputs: Inputs) -> None:
        self._tp, self._inputs = tp, inputs

    @classmethod
    def of(cls, mesh: Mesh, inputs: Inputs) -> OwnRowsOfSteps | None:
        """Return None if the ranks of ``mesh`` divide attention by heads."""
        return cls(mesh.tp, inputs) if mesh.attention == "data" else None

    def of_step(self, batch: Batch, plan: Callable[[Batch], None]) -> OwnRows:
        """Return the rows of this rank of the prepared ``batch``. ``plan`` plans their attention."""
        rows = own_rows(batch, self._tp)
        tokens = to_device(tokens_of(batch, rows), self._inputs.device)
        own = None
        if len(rows):
            own = rows_of(batch, rows)
            self._inputs.prepare(own)
            plan(own)
        return OwnRows(own, tokens, tokens, self._tp)


def own_rows(batch: Batch, tp: Collectives) -> Int64Array:
    """Return the rows of ``batch`` whose requests this rank of ``tp`` keeps."""
    return np.flatnonzero(pool_of(batch.slots, tp.size) == tp.rank)


def tokens_of(batch: Batch, rows: Int64Array) -> Int64Array:
    """Return the indices of the tokens of ``rows`` among the tokens of ``batch``."""
    return tokens_within(batch.extend_lens, rows)


def tokens_within(counts: IntArray, rows: Int64Array) -> Int64Array:
    """Return the indices of the tokens of ``rows`` among the tokens of all rows, of which row r has ``counts[r]``."""
    lens = counts.astype(np.int64)
    starts, own = np.cumsum(lens) - lens, lens[rows]
    ends = np.cumsum(own)
    return np.repeat(starts[rows] - (ends - own), own) + np.arange(ends[-1] if len(ends) else 0)


def rows_of(batch: Batch, rows: Int64Array) -> Batch:
    """Return a batch of some ``rows`` of ``batch``, in their order, that is not prepared."""
    reqs = [batch.reqs[row] for row in rows.tolist()] if batch.reqs else ()
    own = Batch(
        reqs=reqs,
        num_extend=int(np.count_nonzero(rows < batch.num_extend)),
        slots=batch.slots[rows],
        prefix_lens=batch.prefix_lens[rows],
        extend_lens=batch.extend_lens[rows],
        samples=batch.samples[rows],
        page_updates=NO_UPDATES,
    )
    own.variant = batch.variant
    if batch.adapters is not None and batch.adapters[rows].any():
        own.adapters = batch.adapters[rows]
    drafts, lens = batch.drafts, None if batch.drafts is None else batch.drafts.lens[rows]
    if drafts is not None and lens is not None and lens.any():
        most = int(lens.max())
        own.drafts = DraftTree(drafts.token_ids[rows, :most], drafts.parents[rows, :most], lens)
    return own
