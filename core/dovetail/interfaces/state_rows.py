"""Define how the rows of a step are described to operations that keep a state for each request."""

from __future__ import annotations

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

    @classmethod
    def of(
        cls,
        slots: IntArray,
        lens: IntArray,
        fresh: BoolArray,
        device: torch.device | str = "cpu",
        chunk: int = CHUNK,
        writes: bool = True,
    ) -> StateRows:
        """Return the description of rows with ``lens [rows]`` tokens. The device gets it in one copy, for which the host
        does not wait."""
        rows = len(lens)
        indptr, first_chunks = np.zeros(rows + 1, np.int32), np.zeros(rows + 1, np.int32)
        np.cumsum(lens, out=indptr[1:])
        counts = -(-lens // chunk)
        np.cumsum(counts, out=first_chunks[1:])
        chunk_rows = np.repeat(np.arange(rows, dtype=np.int32), counts)
        chunk_starts = indptr[chunk_rows] + (np.arange(len(chunk_rows)) - first_chunks[chunk_rows]) * chunk
        parts = (slots, indptr, fresh, chunk_rows, chunk_starts, first_chunks)
        packed = torch.from_numpy(np.concatenate(parts).astype(np.int32, copy=False))
        if torch.device(device).type == "cuda":
            packed = packed.pin_memory().to(device, non_blocking=True)
        views = packed.split([len(part) for part in parts])
        return cls(np.asarray(lens, np.int32), *views, chunk=chunk, writes=writes)

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
