"""Choose and fill the rows of this rank in captured decode steps, with data-parallel attention (see ``layers.own_rows``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dovetail.engine.captures import NO_UPDATES
from dovetail.engine.inputs import DecodeTensors, decode_arrays
from dovetail.engine.own_rows import kept, most_kept, rows_of
from dovetail.layers.own_rows import OwnRows
from dovetail.types import Batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from dovetail.engine.inputs import Array, Inputs
    from dovetail.interfaces.mesh import Collectives, Mesh


def own_levels(sizes: Sequence[int], count: int, ranks: int) -> list[int]:
    """Return the numbers of own rows, or tokens, with which a step of ``count`` of them is captured, its *levels*, ascending: the
    ``sizes`` of the ladder that hold an even share and the next larger one, and all of the step."""
    share = -(-count // ranks)
    return sorted({*[size for size in sizes if share <= size <= count][:2], count})


def level_of(levels: Sequence[int], most: int) -> int:
    """Return the index of the first of ``levels`` (see ``own_levels``) that is not below ``most``."""
    return next(level for level, count in enumerate(levels) if count >= most)


class OwnRowsOfGraphs:
    """Give a captured step a fixed number of own rows, which is the same on all ranks: the rows of a step are seldom divided
    evenly, and a rank that has fewer rows pads them. A step of a number of rows is captured with one of its levels (see
    ``own_levels``).
    """

    def __init__(self, tp: Collectives, inputs: Inputs, sizes: Sequence[int]) -> None:
        """``sizes`` are the ladder of rows of captured steps."""
        self._tp, self._sizes = tp, sizes
        shares = [False] * (1 + len(inputs.other_pages))
        self._tensors = DecodeTensors(sizes[-1], inputs.pages.shape[1], inputs.device, shares, inputs.num_state_groups)

    @classmethod
    def of(cls, mesh: Mesh, inputs: Inputs, sizes: Sequence[int]) -> OwnRowsOfGraphs | None:
        """Return None if the ranks of ``mesh`` divide attention by heads."""
        return cls(mesh.tp, inputs, sizes) if mesh.attention == "data" else None

    def levels(self, rows: int) -> list[int]:
        """Return the numbers of own rows with which a step of ``rows`` rows is captured, ascending."""
        return own_levels(self._sizes, rows, self._tp.size)

    def level_for(self, batch: Batch, rows: int) -> int:
        """Return the level at which every rank has space for its rows of ``batch``, in a step of ``rows`` rows."""
        return level_of(self.levels(rows), most_kept(batch.slots, self._tp))

    def arrays(self, batch: Batch, rows: int, count: int) -> tuple[Array, ...]:
        """Return what the host sends for ``count`` own rows of ``batch``, in a step of ``rows`` rows: the arrays of
        ``decode_arrays``, and the tokens and targets of ``OwnRows``."""
        mine = kept(batch.slots, self._tp)
        tokens, targets = np.zeros(count, np.int64), np.full(count, rows, np.int64)
        tokens[: len(mine)] = targets[: len(mine)] = mine
        return (*decode_arrays(rows_of(batch, mine), count), tokens, targets)

    def padding(self, rows: int, count: int) -> tuple[Array, ...]:
        """Return ``arrays`` of a step in which every row is padding."""
        nothing = np.zeros(0, np.int32)
        return self.arrays(Batch([], 0, nothing, nothing, nothing, nothing.astype(np.bool_), NO_UPDATES), rows, count)

    def tensors(self, sent: Sequence[torch.Tensor], count: int) -> DecodeTensors:
        """Return the tensors of ``count`` own rows. ``sent`` are the arrays of ``arrays`` on the device."""
        own = self._tensors.narrow(count)
        own.read(sent[:-2])
        return own

    def of_graph(self, batch: Batch, sent: Sequence[torch.Tensor]) -> OwnRows:
        """Return the own rows ``batch`` of a captured step."""
        tokens, targets = sent[-2:]
        return OwnRows(batch, tokens, targets, self._tp, spare=1)

    def follow(self, static: Batch, batch: Batch) -> Batch:
        """Give the own rows of the captured step ``static`` the host lengths of those of ``batch``. Return them."""
        own = static.own.batch
        mine = kept(batch.slots, self._tp)
        own.prefix_lens[: len(mine)], own.prefix_lens[len(mine) :] = batch.prefix_lens[mine], 0
        return own
