"""Fill the inputs of a verify step (rows with drafts) at fixed addresses, padded to a number of tokens.

The number of queries of each row is part of the inputs, so that one graph serves rows of any length. Each padding token
is a separate row of slot 0, which reads page 0 and writes to page 0. Rows of the graph that are left over have no
query.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch

from dovetail.engine.captures import NO_UPDATES
from dovetail.engine.grouped import set_views
from dovetail.types import Batch, DraftTree, PageUpdates

if TYPE_CHECKING:
    from dovetail.engine.inputs import Inputs
    from dovetail.ops.random import Floats
    from dovetail.types import IntArray

Numbers = TypeVar("Numbers", torch.Tensor, "IntArray")


class VerifyShape(NamedTuple):
    """Describe the size of a captured step. ``tokens`` is the number of tokens, and the largest number of rows.
    ``width`` is the largest number of queries of a row. ``tree`` is True if drafts may be trees."""

    tokens: int
    width: int
    tree: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of int32 values in each part of what the host sends (see ``parts``)."""
        tokens, drafts = self.tokens, self.tokens * (self.width - 1)
        return 2 * tokens, 1, tokens, tokens, tokens, drafts, drafts * self.tree

    @property
    def size(self) -> int:
        """Return the number of int32 values in all parts together."""
        return sum(self.sizes)

    @property
    def page_capacity(self) -> int:
        """Return the number of new page table entries that fit after the parts. If there are more, a separate copy
        sends all of them."""
        return 2 * self.tokens + 16

    def parts(self, block: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers, Numbers, Numbers, Numbers]:
        """Return views of ``block``, int32 ``[size]``: random numbers (the bytes of float64 ``[tokens]``), the number
        of rows ``[1]``, and for each row its slot, its number of tokens in the pool and its number of tokens that enter
        (``[tokens]`` each), its drafts ``[tokens, width - 1]``, and for trees their parents."""
        found, start = [], 0
        for size in self.sizes:
            found.append(block[start : start + size])
            start += size
        numbers, rows, slots, prefix_lens, counts, drafts, parents = found
        columns = self.width - 1
        return numbers, rows, slots, prefix_lens, counts, drafts.reshape(-1, columns), parents.reshape(-1, columns)


def write_pages(inputs: Inputs, updates: PageUpdates, shape: VerifyShape, behind: IntArray) -> None:
    """Write new entries of the page table into ``behind`` (int32 ``[1 + 2 * page_capacity]``), the memory after a
    block: their number, their flat indices, and their pages. If there are too many, send them to the device immediately
    instead."""
    entries = inputs.entries_of(updates)
    behind[0] = 0
    if not entries:
        return
    places, pages = entries
    count, capacity = len(places), shape.page_capacity
    if count > capacity:
        inputs.upload(updates=updates)
        return
    behind[0], behind[1 : 1 + count], behind[1 + capacity : 1 + capacity + count] = count, places, pages


def empty_batch() -> Batch:
    """Return a batch without rows: a step in which every token is padding."""
    nothing = np.zeros(0, np.int32)
    return Batch([], 0, nothing, nothing, nothing, nothing.astype(np.bool_), NO_UPDATES)


class VerifyMemory:
    """Hold the tensors of the largest verify step; smaller steps use the beginning of each. ``sent`` and
    ``result_on_host`` are in pinned host memory, which the device reads and writes directly. The other tensors are on
    the device."""

    def __init__(
        self, shape: VerifyShape, max_pages: int, device: torch.device, other_groups: int = 0, state_groups: int = 0
    ) -> None:
        """``other_groups`` is the number of cache groups with pages after the first."""
        tokens, pinned = shape.tokens, device.type == "cuda"
        self.sent = torch.zeros(shape.size + 1 + 2 * shape.page_capacity, dtype=torch.int32, pin_memory=pinned)
        self.block = torch.zeros(shape.size, dtype=torch.int32, device=device)
        self.of_tokens = torch.zeros(4, tokens, dtype=torch.int64, device=device)
        self.indptr = torch.zeros(tokens + 1, dtype=torch.int32, device=device)
        self.slots, self.kv_lens = torch.ones(2, tokens, dtype=torch.int32, device=device)
        self.table = torch.zeros(tokens, max_pages, dtype=torch.int32, device=device)
        # ``page_table`` and ``out_loc`` of each other group
        self.others = [(torch.zeros_like(self.table), torch.zeros_like(self.of_tokens[2])) for _ in range(other_groups)]
        self.state_slots = torch.zeros(state_groups, tokens, dtype=torch.int32, device=device)
        self.accept_lens = torch.zeros(tokens, dtype=torch.int32, device=device)
        self.mask = torch.zeros(tokens if shape.tree else 0, shape.width, dtype=torch.bool, device=device)
        self.result = torch.zeros(tokens, 2 * shape.width + 1, dtype=torch.int64, device=device)
        self.result_on_host = torch.zeros(self.result.shape, dtype=torch.int64, pin_memory=pinned)
        # the shape whose layout the slots in ``sent`` have, and the ``Batch.rows_version`` that they belong to
        self.rows: tuple[VerifyShape, int] | None = None


class VerifyTensors:
    """Hold the tensors of a verify step: what the host sends, and what is computed from it and from the arrays indexed
    by slot.

    ``uniform`` (float64 ``[tokens]``) are random numbers, ``row_of`` (int64 ``[tokens]``) is the row of each token, and
    ``slots [tokens]`` is the slot of each row. ``state_slots`` (int32 ``[state groups, tokens]``) are the slots of each row's
    states; ``accept_lens`` (int32 ``[tokens]``) is set after verification for ``StepStates.advance``.
    """

    def __init__(self, shape: VerifyShape, memory: VerifyMemory) -> None:
        tokens = shape.tokens
        self.shape = shape
        self._memory, self._sent, self._block = memory, memory.sent, memory.block[: shape.size]
        on_host: IntArray = memory.sent.numpy()
        self._own, self._behind = shape.parts(on_host[: shape.size]), on_host[shape.size :]
        numbers, rows, slots, prefix_lens, counts, self.drafts, parents = shape.parts(self._block)
        self.uniform = numbers.view(torch.float64)
        self.parents = parents if shape.tree else None
        self._given = rows, slots, prefix_lens, counts, self.drafts, self.parents
        ids, positions, out_loc, row_of = memory.of_tokens[:, :tokens]
        self._of_tokens, self.row_of = (ids, positions, out_loc, row_of), row_of
        self.indptr, self.slots = memory.indptr[: tokens + 1], memory.slots[:tokens]
        self.state_slots, self.accept_lens = memory.state_slots[:, :tokens], memory.accept_lens[:tokens]
        self._of_rows = self.indptr, self.slots, memory.kv_lens[:tokens], memory.table[:tokens]
        self._others = [(table[:tokens], out_loc[:tokens]) for table, out_loc in memory.others]
        self._mask = memory.mask[:tokens] if shape.tree else None
        self.result, self.result_on_host = memory.result[:tokens], memory.result_on_host[:tokens]
        self._by_tokens: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]] = {}
        self._by_rows: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def write(self, batch: Batch, inputs: Inputs, numbers: Floats | None = None) -> None:
        """Write what the host sends for ``batch``. ``numbers`` is the result of ``verify_numbers``. The device must
        have read what the last call wrote."""
        uniform, num_rows, slots, prefix_lens, counts, drafts, parents = self._own
        rows, version = len(batch.slots), batch.rows_version
        if not version or self._memory.rows != (self.shape, version):
            num_rows[0] = rows
            slots[:rows] = batch.slots
            self._memory.rows = self.shape, version
        prefix_lens[:rows] = batch.prefix_lens
        counts[:rows] = batch.extend_lens
        if batch.drafts is not None:
            count = batch.drafts.token_ids.shape[1]
            drafts[:rows, :count] = batch.drafts.token_ids
            if self.shape.tree:
                parents[:rows, :count] = batch.drafts.parents
        if numbers is not None:
            uniform.view(np.float64)[: len(numbers)] = numbers
        write_pages(inputs, batch.page_updates, self.shape, self._behind)

    def compute(self, inputs: Inputs) -> None:
        """Launch the kernels that copy what the host has written, write new pages into the device's page table, and
        fill the step's tensors. They also read the arrays of ``inputs`` that are indexed by slot."""
        from dovetail.ops.triton.inputs import fetch, verify_inputs

        fetch(self._sent, self._block, self.shape.page_capacity, inputs.all_pages)
        mask = None if self._mask is None else self._mask.view(torch.uint8)
        table = inputs.last_token, inputs.pages, inputs.page_size
        verify_inputs(self._given, *table, self._of_tokens, self._of_rows, mask)
        (ids, positions, _, row_of), (indptr, slots, kv_lens, _) = self._of_tokens, self._of_rows
        for pages, (own, out_loc) in zip(inputs.other_pages, self._others, strict=True):
            of_tokens, of_rows = (ids, positions, out_loc, row_of), (indptr, slots, kv_lens, own)
            verify_inputs(self._given, inputs.last_token, pages, inputs.page_size, of_tokens, of_rows, mask)
        for group, own in enumerate(self.state_slots):
            assert inputs.states is not None
            own.copy_(inputs.states.slots[group].index_select(0, slots))

    def give(self, batch: Batch, rows: int, tokens: int) -> None:
        """Set the engine fields of a batch of ``rows`` rows and ``tokens`` tokens to views. The views are kept for
        later batches of the same size."""
        of_tokens, of_rows = self._by_tokens.get(tokens), self._by_rows.get(rows)
        if of_tokens is None:
            ids, positions, out_loc, _ = self._of_tokens
            mask = None if self._mask is None else self._mask[:tokens]
            of_tokens = self._by_tokens[tokens] = ids[:tokens], positions[:tokens], out_loc[:tokens], mask
        if of_rows is None:
            _, _, kv_lens, table = self._of_rows
            of_rows = self._by_rows[rows] = self.indptr[: rows + 1], kv_lens[:rows], table[:rows]
        batch.input_ids, batch.positions, batch.out_loc, batch.tree_mask = of_tokens
        batch.qo_indptr, batch.kv_lens, batch.page_table = of_rows
        batch.logit_rows = None
        if self._others:
            set_views(batch, [(table[:rows], out_loc[:tokens]) for table, out_loc in self._others])


def static_batch(shape: VerifyShape, context_len: int) -> Batch:
    """Return the batch that is planned and captured. On the host, each row has the largest number of queries and the
    longest context."""
    slots = np.zeros(shape.tokens, np.int32)
    lens = np.full(shape.tokens, shape.width, np.int32)
    batch = Batch([], 0, slots, context_len - lens, lens, slots == 0, NO_UPDATES)
    batch.drafts = DraftTree.chains(np.zeros((shape.tokens, shape.width - 1), np.int32), lens - 1)
    return batch


def set_lens(static: Batch, batch: Batch, tokens: int) -> None:
    """Set the host lengths of a ``static_batch`` to those of ``batch``, which has ``tokens`` tokens. Each padding token
    becomes a row of one token."""
    rows, fill = len(batch.slots), len(static.slots) - tokens
    static.prefix_lens[:rows], static.prefix_lens[rows:] = batch.prefix_lens, 0
    static.extend_lens[:rows], static.extend_lens[rows : rows + fill] = batch.extend_lens, 1
    static.extend_lens[rows + fill :] = 0
