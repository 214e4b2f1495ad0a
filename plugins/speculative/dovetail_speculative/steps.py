"""Provide the steps that all drafters with a model have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from dovetail.interfaces.speculative import DraftCache, DraftPass, DraftSteps
from dovetail.types import DraftTree

if TYPE_CHECKING:
    from typing import Any

    from dovetail.types import Batch, BoolArray, Committed, ForwardOutput, IntArray

    Array = np.ndarray[Any, np.dtype[Any]]

_ONE = np.int32(1)


@dataclass(frozen=True, slots=True, eq=False)
class CommittedTokens:
    """Describe the tokens of a step that have become part of their texts, row by row.

    ``rows`` (int32 ``[n]``) are rows of the batch. Row i has ``counts[i]`` tokens at indices ``starts[i]``,
    ``starts[i] + 1`` and so on. ``index`` (int64 ``[tokens]``) tells which tokens of the step they are, for example in
    ``batch.hidden``. ``next_ids`` (int64 ``[tokens]``) is the token that follows each of them.
    """

    rows: IntArray
    starts: IntArray
    counts: IntArray
    index: Array
    next_ids: Array

    def __getitem__(self, chosen: BoolArray) -> CommittedTokens:
        """Return the tokens of the rows that ``chosen`` (bool ``[n]``) selects."""
        tokens = np.repeat(chosen, self.counts)
        rows, starts, counts = (array[chosen] for array in (self.rows, self.starts, self.counts))
        return CommittedTokens(rows, starts, counts, self.index[tokens], self.next_ids[tokens])


def committed_tokens(batch: Batch, output: ForwardOutput, committed: Committed) -> CommittedTokens | None:
    """Return the tokens of a step that has been committed, or None if there are none.

    These are the whole chunk of a prompt, the token of a decode row, and the accepted path of a verify row with the
    token before it.
    """
    num_extend, extend_lens = batch.num_extend, batch.extend_lens
    counts = committed.known_lens - batch.prefix_lens - _ONE
    if num_extend:
        np.minimum(counts[:num_extend], extend_lens[:num_extend], out=counts[:num_extend])
    rows = (counts > 0).nonzero()[0].astype(np.int32)
    if not len(rows):
        return None
    starts, counts = batch.prefix_lens[rows], counts[rows]
    firsts, ends = (extend_lens.cumsum() - extend_lens)[rows], counts.cumsum()
    index = (firsts - ends + counts).repeat(counts) + np.arange(ends[-1])
    nodes = (output.on_host or output).nodes
    if nodes is not None:
        i = int(rows.searchsorted(num_extend)) if num_extend else 0  # verify rows are the last of the sampled rows
        paths = nodes.cpu().numpy()[rows[i:] - len(extend_lens)]
        accepted = paths[np.arange(paths.shape[1]) < counts[i:, None]]
        index[len(index) - len(accepted) :] = firsts[i:].repeat(counts[i:]) + accepted
    spans = zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True)
    following = [batch.reqs[row].token_ids[start + 1 : start + 1 + count] for row, start, count in spans]
    return CommittedTokens(rows, starts, counts, index, np.concatenate(following, dtype=np.int64))


def chains(num_rows: int, drafts: Mapping[int, IntArray]) -> DraftTree | None:
    """Return ``drafts[row]``, the tokens drafted for a row, as chains of a batch of ``num_rows`` rows; None if there
    are none."""
    width = max(map(len, drafts.values()), default=0)
    if not width:
        return None
    lens, token_ids = np.zeros(num_rows, np.int32), np.zeros((num_rows, width), np.int32)
    for row, draft in drafts.items():
        lens[row] = count = len(draft)
        token_ids[row, :count] = draft
    return DraftTree.chains(token_ids, lens)


class ChainState(NamedTuple):
    """Hold the state of chains.

    ``drafts`` (int64 ``[rows, most]``) has ``lens [rows]`` drafts of each row. ``ids [rows]`` are the last of them, and
    ``hidden [rows, size]`` are the hidden states that the model continues from.
    """

    ids: torch.Tensor
    hidden: torch.Tensor
    drafts: torch.Tensor
    lens: torch.Tensor


class ChainSteps(DraftSteps):
    """Draft one token after the other.

    ``step(batch, ids, hidden)`` takes one token of each row (int64 ``[rows]``) and the ``hidden [rows, hidden_size]``
    that it returned with that token. It returns the next tokens and hidden states. It must do what ``DraftSteps``
    requires of passes.
    """

    widths = (1,)

    def __init__(
        self,
        step: Callable[[Batch, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        most: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Build the steps for chains of up to ``most`` drafts."""
        self._step, self._most, self._hidden_size = step, most, hidden_size
        self._dtype, self._device = dtype, device

    def state(self, rows: int) -> ChainState:
        """See ``DraftSteps.state``."""
        hidden = torch.zeros(rows, self._hidden_size, dtype=self._dtype, device=self._device)
        ids, lens = torch.zeros(2, rows, dtype=torch.int64, device=self._device).unbind(0)
        return ChainState(ids, hidden, ids.new_zeros(rows, self._most), lens)

    def run(self, kind: int, batch: Batch, tokens: torch.Tensor, state: tuple[torch.Tensor, ...]) -> None:
        """See ``DraftSteps.run``."""
        ids, hidden, drafts, lens = state
        next_ids, next_hidden = self._step(batch, ids, hidden)
        drafts.scatter_(1, lens.clamp(max=self._most - 1)[:, None], next_ids[:, None])
        ids.copy_(next_ids)
        hidden.copy_(next_hidden)
        lens += 1

    def draft(
        self,
        cache: DraftCache,
        slots: IntArray,
        starts: IntArray,
        lens: IntArray,
        ids: torch.Tensor,
        hidden: torch.Tensor,
    ) -> IntArray:
        """Return chains of ``lens[i] >= 1`` drafts, int32 ``[rows, longest]``.

        The rows are ordered from the longest chain to the shortest. ``ids`` are the first drafts. The model reads the
        first draft of row i at index ``starts[i]``, and does not read the last draft. Waits for the device.
        """
        longest = int(lens.max())
        fresh = self.state(len(lens))
        fresh.drafts[:, 0] = ids
        fresh.lens.fill_(1)
        step = np.arange(1, longest)[:, None]
        passes = [
            DraftPass(0, place, count)
            for place, count in zip((starts + step - 1).astype(np.int32), (lens > step).astype(np.int32), strict=True)
        ]
        left = cache.run(self, slots, passes, fresh._replace(ids=ids, hidden=hidden)) if passes else fresh
        return left[2][:, :longest].cpu().numpy().astype(np.int32)


class TextState(NamedTuple):
    """Hold the state of texts.

    ``ids [rows, most]`` are tokens of texts and ``hidden [rows, most, size]`` the hidden states for them.
    ``outputs [rows, output size]`` are the model's outputs for the last token of each row.
    """

    ids: torch.Tensor
    hidden: torch.Tensor
    outputs: torch.Tensor


class TextSteps(DraftSteps):
    """Read the tokens that have become part of texts since the last time, up to ``most`` tokens per row.

    ``read(batch, ids, hidden)`` returns the model's outputs of all tokens, ``[tokens, output size]``. It must do what
    ``DraftSteps`` requires of passes.
    """

    def __init__(
        self,
        read: Callable[[Batch, torch.Tensor, torch.Tensor], torch.Tensor],
        most: int,
        sizes: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Build the steps. ``sizes`` are the sizes of hidden states and of outputs."""
        self.widths = (1, most)
        self._read, self._sizes, self._dtype, self._device = read, sizes, dtype, device

    def state(self, rows: int) -> TextState:
        """See ``DraftSteps.state``."""
        most, (size, out) = self.widths[-1], self._sizes
        ids = torch.zeros(rows, most, dtype=torch.int64, device=self._device)
        hidden = torch.zeros(rows, most, size, dtype=self._dtype, device=self._device)
        return TextState(ids, hidden, hidden.new_zeros(rows, out))

    def run(self, kind: int, batch: Batch, tokens: torch.Tensor, state: tuple[torch.Tensor, ...]) -> None:
        """See ``DraftSteps.run``."""
        ids, hidden, outputs = state
        read = self._read(batch, ids.flatten().index_select(0, tokens), hidden.flatten(0, 1).index_select(0, tokens))
        outputs.copy_(read.index_select(0, batch.qo_indptr[1 : len(outputs) + 1] - 1))

    def places(self, counts: IntArray) -> Array:
        """Return where the tokens of rows of ``counts`` tokens go in the flattened ``[rows, most]``: int64
        ``[tokens]``."""
        before = np.cumsum(counts) - counts
        return np.arange(int(counts.sum())) + np.repeat(np.arange(len(counts)) * self.widths[-1] - before, counts)

    def take(
        self,
        cache: DraftCache,
        rows: tuple[IntArray, IntArray, IntArray],
        places: torch.Tensor,
        ids: torch.Tensor,
        hidden: torch.Tensor,
    ) -> torch.Tensor:
        """Read tokens and return the outputs of the last token of each row.

        ``rows`` are slots, starts and counts. ``places`` are the places of ``ids`` and ``hidden`` (see
        ``TextSteps.places``).
        """
        slots, starts, counts = rows
        state = self.state(len(slots))
        state.ids.view(-1).index_copy_(0, places, ids)
        state.hidden.flatten(0, 1).index_copy_(0, places, hidden)
        return cache.run(self, slots, [DraftPass(int(counts.max() > 1), starts, counts)], state)[2]
