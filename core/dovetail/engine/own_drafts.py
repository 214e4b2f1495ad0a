"""Choose and fill the rows of this rank in captured passes of drafters, with data-parallel attention (see ``layers.own_rows``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from dovetail.engine.draft_layout import Placed, one_each, padding, wide
from dovetail.engine.inputs import pack
from dovetail.engine.own_graphs import level_of, own_levels
from dovetail.engine.own_rows import kept, most_kept, tokens_within
from dovetail.interfaces.speculative import DraftPass
from dovetail.layers.own_rows import OwnRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.engine.draft_layout import Bytes
    from dovetail.engine.inputs import Inputs
    from dovetail.interfaces.mesh import Collectives, Mesh
    from dovetail.types import Batch, Int64Array, IntArray


class OwnShape(NamedTuple):
    """Describe the own tokens of a captured pass: there are ``tokens``, in rows of up to ``width``, in a pass of ``all_tokens``
    tokens. ``stride`` is the largest number of tokens that a row has in any pass."""

    tokens: int
    width: int
    all_tokens: int
    stride: int


class OwnDraftRows:
    """Give captured passes a fixed number of own rows, which is the same on all ranks: a pass of a number of rows is captured with
    one of a few numbers of own rows, its levels (see ``own_levels``). A rank that has fewer pads them."""

    def __init__(self, tp: Collectives) -> None:
        self._tp = tp

    @classmethod
    def of(cls, mesh: Mesh) -> OwnDraftRows | None:
        """Return None if the ranks of ``mesh`` divide attention by heads."""
        return cls(mesh.tp) if mesh.attention == "data" else None

    def levels(self, sizes: Sequence[int], rows: int) -> list[int]:
        """Return the numbers of own rows with which a pass of ``rows`` rows is captured, ascending. ``sizes`` are the ladder."""
        return own_levels(sizes, rows, self._tp.size)

    def level_for(self, slots: IntArray, sizes: Sequence[int], rows: int) -> int:
        """Return the level at which every rank has space for its requests among ``slots``, in a pass of ``rows`` rows."""
        return level_of(self.levels(sizes, rows), most_kept(slots, self._tp))

    def kept(self, slots: IntArray) -> Int64Array:
        """Return the indices of the requests among ``slots`` that this rank keeps."""
        return kept(slots, self._tp)

    def rows(self, batch: Batch, buffer: torch.Tensor, shape: OwnShape) -> OwnRows:
        """Return the own rows of a captured pass, and give their ``batch`` its tensors: views of ``buffer``, which holds the bytes of
        ``own_bytes``."""
        size = 8 * shape.tokens
        tokens, targets = (buffer[start : start + size].view(torch.int64) for start in (0, size))
        placed = Placed.of(buffer[2 * size :], shape.tokens, shape.width, shape.stride)
        batch.positions, batch.out_loc, batch.kv_lens, _, batch.qo_indptr = placed
        return OwnRows(batch, tokens, targets, self._tp, spare=1)


class OwnPass(NamedTuple):
    """Hold the part of a pass that some of its rows have, and the indices of their tokens in the pass."""

    given: DraftPass
    tokens: Int64Array

    @classmethod
    def of(cls, given: DraftPass, rows: Int64Array) -> OwnPass:
        """Return the part of ``given`` that belongs to ``rows``."""
        tokens = tokens_within(given.counts, rows)
        positions = None if given.positions is None else given.positions[tokens]
        return cls(DraftPass(given.kind, given.starts[rows], given.counts[rows], positions), tokens)


def own_bytes(inputs: Inputs, table: IntArray, passes: Sequence[OwnPass], shapes: Sequence[OwnShape]) -> list[Bytes]:
    """Return the bytes that the host sends for the own rows of each pass, padded to its shape: ``OwnRows.tokens`` and
    ``OwnRows.targets``, then how their tokens are laid out (see ``Placed``). ``table`` has the pages of the own rows. All passes with
    one token in each row have the same shape."""
    pairs = list(zip(passes, shapes, strict=True))
    ones = [own.given for own, shape in pairs if shape.width == 1]
    rows = next((shape.tokens for shape in shapes if shape.width == 1), 0)
    laid = iter(one_each(inputs, table, ones, rows) if ones else [])
    return [
        np.concatenate(
            [
                _places(own.tokens, shape).view(np.uint8),
                next(laid) if shape.width == 1 else wide(inputs, table, own.given, shape.tokens, shape.stride),
            ]
        )
        for own, shape in pairs
    ]


def own_padding(shape: OwnShape) -> Bytes:
    """Return the bytes of a pass in which every own token is padding."""
    laid = pack(padding(shape.tokens, shape.width))
    return np.concatenate([_places(np.zeros(0, np.int64), shape).view(np.uint8), laid])


def _places(tokens: Int64Array, shape: OwnShape) -> Int64Array:
    """Return ``OwnRows.tokens`` and ``OwnRows.targets``, one after the other. Padding writes to a row after those of the pass."""
    places = np.zeros(2 * shape.tokens, np.int64)
    places[shape.tokens :] = shape.all_tokens
    places[: len(tokens)] = places[shape.tokens : shape.tokens + len(tokens)] = tokens
    return places
