"""Lay out the tokens of a drafter's passes for graphs. The host does as little work as possible, because the device is
idle meanwhile."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from dovetail.engine.inputs import pack, unpack
from dovetail.types import Batch, DraftTree

if TYPE_CHECKING:
    from dovetail.engine.inputs import Array, Inputs
    from dovetail.interfaces.speculative import DraftPass
    from dovetail.types import Int64Array, IntArray

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Placed(NamedTuple):
    """Hold the device tensors that lay out a pass. The pass has as many rows as tokens. ``positions`` and ``out_loc``
    (int64 ``[tokens]``) are the position of each token and its location in the pool, and ``kv_lens [tokens]`` is the KV
    length of each row. ``which`` (int64 ``[tokens]``) is the index of each token among the ``[rows, stride]`` tokens
    that the rows could have, and ``indptr [tokens + 1]`` is ``Batch.qo_indptr``."""

    positions: torch.Tensor
    out_loc: torch.Tensor
    kv_lens: torch.Tensor
    which: torch.Tensor
    indptr: torch.Tensor

    @classmethod
    def of(cls, buffer: torch.Tensor, tokens: int, width: int, stride: int) -> Placed:
        """Return views of ``buffer``, which holds the bytes of ``padding``, ``one_each`` or ``wide``. In a pass with
        one token in each row, ``which`` and ``indptr`` never change; they are made here and are not in the buffer.
        ``stride`` is the largest number of tokens that a row has in any pass."""
        sent = unpack(buffer, padding(tokens, width))
        if width > 1:
            return cls._make(sent)
        positions, out_loc, kv_lens = sent
        which = torch.arange(0, tokens * stride, stride, device=buffer.device)
        indptr = torch.arange(tokens + 1, dtype=torch.int32, device=buffer.device)
        return cls(positions, out_loc, kv_lens, which, indptr)


def padding(tokens: int, width: int) -> tuple[Array, ...]:
    """Return the arrays of a pass in which every token is padding: a row that reads page 0 and writes to page 0."""
    zeros, lens = np.zeros(tokens, np.int64), np.ones(tokens, np.int32)
    arrays = zeros, zeros, lens
    return arrays if width == 1 else (*arrays, zeros, np.arange(tokens + 1, dtype=np.int32))


def one_each(inputs: Inputs, table: IntArray, passes: Sequence[DraftPass], rows: int) -> list[Bytes]:
    """Return the bytes of ``passes`` with one token in each row, each padded to ``rows`` rows. ``table`` has the pages
    of the real rows. After them it may have rows that have no token in any of these passes."""
    table = table[:rows]
    real = len(table)
    active = np.stack([one.counts[:real] for one in passes]) > 0
    places = np.where(active, np.stack([one.starts[:real] for one in passes]), 0)
    page, offset = np.divmod(places, inputs.page_size)
    found = table[np.arange(real), page].astype(np.int64) * inputs.page_size + offset
    packed = np.zeros((len(passes), len(pack(padding(rows, 1)))), np.uint8)
    positions, out_loc = (packed[:, 8 * rows * i : 8 * rows * (i + 1)].view(np.int64) for i in (0, 1))
    kv_lens = packed[:, 16 * rows : 20 * rows].view(np.int32)
    positions[:, :real], out_loc[:, :real] = places, np.where(active, found, 0)
    kv_lens[:] = 1
    kv_lens[:, :real] += places.astype(np.int32)
    for at, one in enumerate(passes):
        if one.positions is not None:
            positions[at, : len(one.positions)] = one.positions
    return list(packed)


class PassShape(NamedTuple):
    """Describe how the tokens of a padded pass are divided among its rows. For each real token, ``row_of`` is its row
    and ``nth`` is its index in that row. ``which`` and ``indptr`` are those of ``Placed``, with padding."""

    row_of: Int64Array
    nth: Int64Array
    which: Int64Array
    indptr: IntArray


@functools.lru_cache(256)
def _shape(counts: tuple[int, ...], tokens: int, stride: int) -> PassShape:
    """Return the shape of a pass. Shapes are cached, because most passes have the shape of an earlier one. ``stride``
    is the largest number of tokens that a row has in any pass."""
    lens, total = np.array(counts, np.int64), sum(counts)
    ends = np.cumsum(lens)
    row_of = np.repeat(np.arange(len(counts)), lens)
    nth = np.arange(total) - np.repeat(ends - lens, lens)
    which, indptr = np.zeros(tokens, np.int64), np.full(tokens + 1, tokens, np.int32)
    which[:total] = row_of * stride + nth
    indptr[0], indptr[1 : len(counts) + 1] = 0, ends
    indptr[len(counts) + 1 : len(counts) + 1 + tokens - total] = np.arange(total + 1, tokens + 1)
    return PassShape(row_of, nth, which, indptr)


def wide(inputs: Inputs, table: IntArray, given: DraftPass, tokens: int, stride: int) -> Bytes:
    """Return the bytes of a pass with several tokens in each row, padded to ``tokens`` tokens and as many rows."""
    counts = given.counts[given.counts > 0]
    row_of, nth, which, indptr = _shape(tuple(counts.tolist()), tokens, stride)
    places = given.starts[row_of] + nth
    positions, out_loc = np.zeros((2, tokens), np.int64)
    positions[: len(places)] = places if given.positions is None else given.positions
    out_loc[: len(places)] = inputs.locate(row_of, places, table)
    kv_lens = np.ones(tokens, np.int32)
    kv_lens[: len(counts)] = given.starts[: len(counts)] + counts
    return pack((positions, out_loc, kv_lens, which, indptr))


def set_lens(static: Batch, given: DraftPass) -> None:
    """Set the host lengths of a captured batch to those of a pass, with padding."""
    rows, total = int(np.count_nonzero(given.counts)), int(given.counts.sum())
    fill = len(static.prefix_lens) - total
    static.prefix_lens[:rows], static.prefix_lens[rows:] = given.starts[:rows], 0
    static.extend_lens[:rows], static.extend_lens[rows : rows + fill] = given.counts[:rows], 1
    static.extend_lens[rows + fill :] = 0


def wide_shape(counts: IntArray) -> DraftTree:
    """Return a ``DraftTree`` whose lengths give row r ``counts[r]`` queries. Its tokens and parents have no meaning,
    because the tree mask of the pass decides which tokens see each other."""
    width = max(int(counts.max()) - 1, 1)
    nothing = np.zeros((len(counts), width), np.int32)
    return DraftTree(nothing, nothing + np.arange(-1, width - 1, dtype=np.int32), (counts - 1).astype(np.int32))


def seen_by(mask: torch.Tensor, index: torch.Tensor, width: int) -> torch.Tensor:
    """Return bool ``[tokens, width]``: which of the first ``width`` tokens of their own row the tokens ``index`` see.
    ``mask`` is ``[rows, n, n]``, and ``index`` counts the tokens of its first two dimensions."""
    return mask.flatten(0, 1).index_select(0, index)[:, :width]
