"""Find the rows of a step whose requests this rank keeps, and prepare them for data-parallel attention (see
``layers.own_rows``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dovetail.engine.captures import NO_UPDATES
from dovetail.layers.own_rows import OwnRows
from dovetail.memory.table import pool_of
from dovetail.ops.transfer import to_device
from dovetail.types import Batch, DraftTree, StateSaves

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
        rows = kept(batch.slots, self._tp)
        tokens = to_device(tokens_of(batch, rows), self._inputs.device)
        own = None
        if len(rows):
            own = rows_of(batch, rows)
            self._inputs.prepare(own)
            plan(own)
        return OwnRows(own, tokens, tokens, self._tp)


def kept(slots: IntArray, tp: Collectives) -> Int64Array:
    """Return the indices of the requests in ``slots`` that this rank of ``tp`` keeps, ascending."""
    return np.flatnonzero(pool_of(slots, tp.size) == tp.rank)


def most_kept(slots: IntArray, tp: Collectives, counts: IntArray | None = None) -> int:
    """Return the largest number of requests in ``slots`` that a rank of ``tp`` keeps; with ``counts``, the largest number of their tokens,
    of which request i has ``counts[i]``."""
    return int(np.bincount(pool_of(slots, tp.size), weights=counts).max())


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
    if batch.drafts is not None:
        lens = batch.drafts.lens[rows]
        most = int(lens.max(initial=0))
        if most:
            own.drafts = DraftTree(batch.drafts.token_ids[rows, :most], batch.drafts.parents[rows, :most], lens)
    saves = batch.state_saves
    if saves is not None and (chosen := np.isin(saves.rows, rows)).any():
        places = np.searchsorted(rows, saves.rows[chosen]).astype(np.int32)
        own.state_saves = StateSaves(places, *(each[chosen] for each in saves[1:]))
    return own
