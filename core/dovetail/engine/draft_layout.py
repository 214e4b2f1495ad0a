"""Where the tokens of a drafter's passes stand, as graphs want it: on the host, as little work as can be, as the device waits."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from dovetail.engine.inputs import pack, unpack
from dovetail.types import Batch, DraftTree

if TYPE_CHECKING:
    from dovetail.engine.inputs import Array, Inputs, Int64Array
    from dovetail.interfaces.speculative import DraftPass
    from dovetail.types import IntArray

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Placed(NamedTuple):
    """Of each token its position and its place in the pool, int64 ``[tokens]``; of each row ``kv_lens [tokens]``; the index of each token
    among those that the rows can have, int64 ``[tokens]``, and ``qo_indptr [tokens + 1]``. There are as many rows as tokens."""

    positions: torch.Tensor
    out_loc: torch.Tensor
    kv_lens: torch.Tensor
    which: torch.Tensor
    indptr: torch.Tensor

    @classmethod
    def of(cls, buffer: torch.Tensor, tokens: int, width: int, stride: int) -> Placed:
        """Views of ``buffer``, which holds the bytes of ``padding``, ``one_each`` or ``wide``. With one token a row the last two
        never change, and are not in it. A row can have ``stride`` tokens in other passes."""
        sent = unpack(buffer, padding(tokens, width))
        if width > 1:
            return cls._make(sent)
        positions, out_loc, kv_lens = sent
        which = torch.arange(0, tokens * stride, stride, device=buffer.device)
        indptr = torch.arange(tokens + 1, dtype=torch.int32, device=buffer.device)
        return cls(positions, out_loc, kv_lens, which, indptr)


def padding(tokens: int, width: int) -> tuple[Array, ...]:
    """The arrays of a pass in which every token fills up: a row that reads page 0 and writes to page 0."""
    zeros, lens = np.zeros(tokens, np.int64), np.ones(tokens, np.int32)
    arrays = zeros, zeros, lens
    return arrays if width == 1 else (*arrays, zeros, np.arange(tokens + 1, dtype=np.int32))


def one_each(inputs: Inputs, table: IntArray, passes: Sequence[DraftPass], rows: int) -> list[Bytes]:
    """The bytes of ``passes`` of one token a row, each filled up to ``rows`` rows. ``table`` has the pages of those that there
    are, and perhaps of others behind them that no pass has a token of."""
    table = table[:rows]
    real = len(table)
    going = np.stack([one.counts[:real] for one in passes]) > 0
    places = np.where(going, np.stack([one.starts[:real] for one in passes]), 0)
    page, offset = np.divmod(places, inputs.page_size)
    found = table[np.arange(real), page].astype(np.int64) * inputs.page_size + offset
    packed = np.zeros((len(passes), len(pack(padding(rows, 1)))), np.uint8)
    positions, out_loc = (packed[:, 8 * rows * i : 8 * rows * (i + 1)].view(np.int64) for i in (0, 1))
    kv_lens = packed[:, 16 * rows : 20 * rows].view(np.int32)
    positions[:, :real], out_loc[:, :real] = places, np.where(going, found, 0)
    kv_lens[:] = 1
    kv_lens[:, :real] += places.astype(np.int32)
    for at, one in enumerate(passes):
        if one.positions is not None:
            positions[at, : len(one.positions)] = one.positions
    return list(packed)


class Shape(NamedTuple):
    """How the tokens of a pass are divided among its rows, filled up: of each real token its row and the how-manieth it is, of
    all tokens ``which`` and ``indptr`` as in ``Placed``."""

    row_of: Int64Array
    nth: Int64Array
    which: Int64Array
    indptr: IntArray


@functools.lru_cache(256)
def _shape(counts: tuple[int, ...], tokens: int, stride: int) -> Shape:
    """Kept, as most passes are like one before. ``stride`` is how many tokens a row can have."""
    lens, total = np.array(counts), sum(counts)
    ends = np.cumsum(lens)
    row_of = np.repeat(np.arange(len(counts)), lens)
    nth = np.arange(total) - np.repeat(ends - lens, lens)
    which, indptr = np.zeros(tokens, np.int64), np.full(tokens + 1, tokens, np.int32)
    which[:total] = row_of * stride + nth
    indptr[0], indptr[1 : len(counts) + 1] = 0, ends
    indptr[len(counts) + 1 : len(counts) + 1 + tokens - total] = np.arange(total + 1, tokens + 1)
    return Shape(row_of, nth, which, indptr)


def wide(inputs: Inputs, table: IntArray, given: DraftPass, tokens: int, stride: int) -> Bytes:
    """The bytes of a pass of several tokens a row, filled up to ``tokens`` tokens and as many rows."""
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
    """Set the host's lengths of a captured batch to those of a pass, filled up."""
    rows, total = int(np.count_nonzero(given.counts)), int(given.counts.sum())
    fill = len(static.prefix_lens) - total
    static.prefix_lens[:rows], static.prefix_lens[rows:] = given.starts[:rows], 0
    static.extend_lens[:rows], static.extend_lens[rows : rows + fill] = given.counts[:rows], 1
    static.extend_lens[rows + fill :] = 0


def wide_shape(counts: IntArray) -> DraftTree:
    """That rows have so many queries; how they hang together is in the mask."""
    width = max(int(counts.max()) - 1, 1)
    nothing = np.zeros((len(counts), width), np.int32)
    return DraftTree(nothing, nothing + np.arange(-1, width - 1, dtype=np.int32), (counts - 1).astype(np.int32))


def seen_by(mask: torch.Tensor, index: torch.Tensor, width: int) -> torch.Tensor:
    """Of ``mask [rows, n, n]`` what the tokens ``index`` see of the first ``width`` tokens of their rows: ``[tokens, width]``."""
    return mask.flatten(0, 1).index_select(0, index)[:, :width]
