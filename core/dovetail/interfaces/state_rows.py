"""Define how the rows of a step are described to operations that keep a state for each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dovetail.types import BoolArray, IntArray

CHUNK = 64


@dataclass(frozen=True, slots=True, eq=False)
class StateRows:
    """Describe rows of tokens and the slots of their states. Row r owns tokens ``[indptr[r], indptr[r + 1])``, which may
    be none, and its state is in slot ``slots[r]``. If ``fresh[r]`` is not 0, the row begins with a state of zeros,
    whatever its slot holds.

    Slot 0 belongs to rows that pad a batch: they begin with zeros too, and no operation writes to this slot. Other
    slots belong to one row each. A row without tokens leaves its slot as it is.

    Each row is divided into chunks of ``chunk`` tokens, of which the last may be shorter: chunk c begins with token
    ``chunk_starts[c]`` of row ``chunk_rows[c]``. The chunks of row r are ``[first_chunks[r], first_chunks[r + 1])``.
    The tensors are int32 and on the device; ``lens`` is on the host.

    The state after chunk c is written to slot ``saves[c]`` too, if that is not 0. These slots belong to no
    row. The last chunk of a row is not saved, so that what is saved has ``chunk`` tokens or more of its row before it.
    Backends that offer ``mixer.snapshots`` implement this; for others all are 0.

    Without ``writes`` operations leave all states as they are, because the tokens are drafts: operations whose names end
    in ``_advance`` write the states after those that are accepted.
    """

    lens: IntArray  # [rows] tokens of each row
    slots: torch.Tensor  # [rows]
    indptr: torch.Tensor  # [rows + 1]
    fresh: torch.Tensor  # [rows]
    chunk_rows: torch.Tensor  # [chunks]
    chunk_starts: torch.Tensor  # [chunks]
    first_chunks: torch.Tensor  # [rows + 1]
    chunk: int = CHUNK
    writes: bool = True
    saves: torch.Tensor | None = None  # [chunks]; None if ``writes`` is False

    @classmethod
    def of(
        cls,
        slots: IntArray,
        lens: IntArray,
        fresh: BoolArray,
        device: torch.device | str = "cpu",
        chunk: int = CHUNK,
        writes: bool = True,
        saves: Sequence[tuple[int, int, int]] = (),
    ) -> StateRows:
        """Return the description of rows with ``lens [rows]`` tokens. ``saves`` has the row, the number of its tokens, and the
        slot of each state that is saved. The device gets all in one copy, for which the host does not wait."""
        rows = len(lens)
        indptr, first_chunks = np.zeros(rows + 1, np.int32), np.zeros(rows + 1, np.int32)
        np.cumsum(lens, out=indptr[1:])
        counts = -(-lens // chunk)
        np.cumsum(counts, out=first_chunks[1:])
        chunk_rows = np.repeat(np.arange(rows, dtype=np.int32), counts)
        chunk_starts = indptr[chunk_rows] + (np.arange(len(chunk_rows)) - first_chunks[chunk_rows]) * chunk
        parts = [slots, indptr, fresh, chunk_rows, chunk_starts, first_chunks]
        if writes:  # without saves too, so that the same kernels run
            parts.append(_saved_chunks(saves, lens, first_chunks, chunk))
        packed = torch.from_numpy(np.concatenate(parts).astype(np.int32, copy=False))
        if torch.device(device).type == "cuda":
            packed = packed.pin_memory().to(device, non_blocking=True)
        views = packed.split([len(part) for part in parts])
        tensors, saved = views[:6], views[6] if writes else None
        return cls(np.asarray(lens, np.int32), *tensors, chunk=chunk, writes=writes, saves=saved)

    def save(self, state: torch.Tensor, chunks: torch.Tensor, new: torch.Tensor) -> None:
        """Write ``new [n, ...]``, the states after the chunks ``chunks [n]`` (int64), to the slots of those that are saved."""
        if self.saves is not None:
            slots = self.saves[chunks].long()
            kept = slots != 0
            state[slots[kept]] = new[kept].to(state.dtype)

    def initial(self, state: torch.Tensor) -> torch.Tensor:
        """Return a copy of the states ``state[slots]`` with which the rows begin, zeros for fresh and padding rows."""
        zero = (self.fresh != 0) | (self.slots == 0)
        return state[self.slots.long()].masked_fill_(zero.view(-1, *[1] * (state.ndim - 1)), 0)

    def store(self, state: torch.Tensor, new: torch.Tensor) -> None:
        """Write ``new [rows, ...]`` to the slots of the rows that have tokens, if they are to be written."""
        if not self.writes:
            return
        written = (self.slots != 0) & (self.indptr[1:] > self.indptr[:-1])
        state[self.slots[written].long()] = new[written].to(state.dtype)


def _saved_chunks(
    saves: Sequence[tuple[int, int, int]], lens: IntArray, first_chunks: IntArray, chunk: int
) -> IntArray:
    """Return ``StateRows.saves``."""
    found = np.zeros(int(first_chunks[-1]), np.int32)
    for row, length, slot in saves:
        assert 0 < length < lens[row], f"the state after {length} of {lens[row]} tokens is not within the row"
        assert length % chunk == 0, f"the state after {length} tokens is not that after a chunk of {chunk}"
        found[first_chunks[row] + length // chunk - 1] = slot
    return found
