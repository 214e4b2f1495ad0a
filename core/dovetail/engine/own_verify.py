"""Choose and fill the rows of this rank in captured verify steps, with data-parallel attention (see ``layers.own_rows``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dovetail.engine.own_graphs import level_of, own_levels
from dovetail.engine.own_rows import kept, most_kept, rows_of, tokens_of
from dovetail.engine.verify_inputs import VerifyMemory, VerifyShape, VerifyTensors, empty_batch, set_lens, static_batch
from dovetail.layers.own_rows import OwnRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.engine.inputs import Inputs
    from dovetail.interfaces.mesh import Collectives, Mesh
    from dovetail.types import Batch, Int64Array


class OwnVerifyRows:
    """Give captured verify steps a fixed number of own tokens, which is the same on all ranks: a step of a number of tokens is captured
    with one of a few numbers of own tokens, its levels (see ``own_levels``)."""

    def __init__(self, tp: Collectives, inputs: Inputs, largest: VerifyShape, counts: Sequence[int]) -> None:
        """``counts`` are the ladder of tokens of captured steps, ``largest`` the shape of the largest one."""
        self._tp, self._inputs, self._counts, self._width = tp, inputs, counts, largest.width
        groups = len(inputs.other_pages), inputs.num_state_groups
        self._memory = VerifyMemory(largest, inputs.pages.shape[1], inputs.device, *groups)

    @classmethod
    def of(cls, mesh: Mesh, inputs: Inputs, largest: VerifyShape, counts: Sequence[int]) -> OwnVerifyRows | None:
        """Return None if the ranks of ``mesh`` divide attention by heads."""
        return cls(mesh.tp, inputs, largest, counts) if mesh.attention == "data" else None

    def levels(self, tokens: int) -> list[int]:
        """Return the numbers of own tokens with which a step of ``tokens`` tokens is captured, ascending."""
        return own_levels(self._counts, tokens, self._tp.size)

    def level_for(self, batch: Batch, tokens: int) -> int:
        """Return the level at which every rank has space for its tokens of ``batch``, in a step of ``tokens`` tokens."""
        return level_of(self.levels(tokens), most_kept(batch.slots, self._tp, batch.extend_lens))

    def step(self, tokens: int, level: int, context_len: int, *, tree: bool) -> OwnVerifyStep:
        """Return the own rows of a step of ``tokens`` tokens. With ``tree``, drafts may be trees."""
        shape = VerifyShape(self.levels(tokens)[level], self._width, tree)
        return OwnVerifyStep(self._tp, self._inputs, VerifyTensors(shape, self._memory), tokens, context_len)


class OwnVerifyStep:
    """Hold the own rows of a verify step whose tensors have fixed addresses. ``batch`` must be planned, and ``rows`` are what the
    layers of attention read."""

    def __init__(
        self, tp: Collectives, inputs: Inputs, tensors: VerifyTensors, step_tokens: int, context_len: int
    ) -> None:
        count = tensors.shape.tokens
        self._tp, self._inputs, self._step_tokens, self.tensors = tp, inputs, step_tokens, tensors
        self.mine = np.zeros(0, np.int64)  # the rows of this rank, in the batch that was written last
        self.batch = static_batch(tensors.shape, context_len)
        tensors.give(self.batch, count, count)
        # no row is sampled here: the memory of random numbers holds the index of each token in the step
        self._places = tensors.uniform.view(torch.int64)
        self.rows = OwnRows(self.batch, torch.zeros_like(self._places), torch.zeros_like(self._places), tp, spare=1)

    def write(self, batch: Batch) -> None:
        """Write what the host sends for the own rows of ``batch``, and set the host lengths of the planned batch. The device must have
        read what the last call wrote."""
        self.mine = mine = kept(batch.slots, self._tp)
        own = rows_of(batch, mine) if len(mine) else empty_batch()
        tokens = tokens_of(batch, mine)
        self._send(own, tokens)
        set_lens(self.batch, own, len(tokens))

    def write_padding(self) -> None:
        """Write a step in which every token is padding. The host lengths of the planned batch stay the largest."""
        self._send(empty_batch(), np.zeros(0, np.int64))

    def _send(self, own: Batch, tokens: Int64Array) -> None:
        places = np.full(
            len(self._places), self._step_tokens, np.int64
        )  # padding writes to a row after those of the step
        places[: len(tokens)] = tokens
        self.tensors.write(own, self._inputs, places.view(np.float64))

    def compute(self) -> None:
        """Launch the kernels that fill the inputs. Indices stay within the step also when what the host sends belongs to another one, as
        in steps whose kernels are only noted."""
        self.tensors.compute(self._inputs)
        torch.clamp(self._places, min=0, max=self._step_tokens, out=self.rows.targets)
        torch.clamp(self.rows.targets, max=self._step_tokens - 1, out=self.rows.tokens)
