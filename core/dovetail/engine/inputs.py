"""Fill the tensors of a forward pass from a batch of requests.

What a step needs from earlier steps stays on the device, in arrays that are indexed by slot: the last token of each
request and the page table. The host sends only what is new, in one packed copy: slots, lengths, new pages, random
numbers, prompt tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from dovetail.engine.grouped import set_views
from dovetail.ops.transfer import to_device

if TYPE_CHECKING:
    from dovetail.engine.states import StateSlots
    from dovetail.types import Batch, DraftTree, Int64Array, IntArray, PageUpdates, SharedPrefixes

Array = np.ndarray[Any, Any]

_TORCH = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.bool_): torch.bool,
}


ALL_TOKENS = 1 << 30
"""The number of tokens of a page that holds all tokens of a request."""


class Inputs:
    """Keep the arrays that are indexed by slot, and fill the tensors of a batch from them.

    ``page_table`` is the host's page table of the first cache group, which the scheduler writes and this class only
    reads. ``pages`` is the device's copy of it, which the updates of each batch bring up to date; on a CPU it is the
    same memory. ``other_tables`` and ``other_pages`` are the same for the groups after the first. ``last_token`` int64
    ``[slots]`` has the last token of each request.
    """

    def __init__(
        self, page_tables: IntArray, page_size: int, device: torch.device, states: StateSlots | None = None
    ) -> None:
        """``page_tables`` is int32 ``[groups, slots, max_pages]`` and contiguous, with slot 0 for rows that pad a step.
        Without groups, page 0 holds all tokens of every request: nothing is stored there. ``states`` has the states of
        requests if the model keeps some."""
        self.page_size = page_size
        self.device = device
        self.states = states
        self._has_pages = len(page_tables) > 0
        if not self._has_pages:
            self.page_size, page_tables = ALL_TOKENS, np.zeros((1, page_tables.shape[1], 1), np.int32)
        self.page_table, *self.other_tables = page_tables
        on_host = torch.from_numpy(page_tables)
        self.all_pages = on_host if device.type == "cpu" else on_host.to(device)
        self.pages, *self.other_pages = self.all_pages.unbind(0)
        self.last_token = torch.zeros(len(self.page_table), dtype=torch.int64, device=device)
        # what a decode step on a CPU has in common with the step before if it has the same ``rows_version``
        self._decode_rows: tuple[int, Int64Array, torch.Tensor, torch.Tensor] = (
            0,
            np.arange(0),
            self.last_token[:0],
            self.last_token[:0],
        )
        self._flat_table, self._flat_pages = page_tables.reshape(-1), self.all_pages.view(-1)
        # what must be added to an index in the first group's table to get that in each other group
        self._group_offsets = np.arange(1, len(page_tables))[:, None] * self.page_table.size
        self._located_version = 0
        self._entries: tuple[()] | tuple[Int64Array, IntArray] = ()  # of the updates with ``_located_version``

    @property
    def num_state_groups(self) -> int:
        """Return the number of cache groups of states."""
        return 0 if self.states is None else len(self.states.stores)

    def prepare(self, batch: Batch) -> None:
        """Set the batch's engine fields, and send its page updates to the device. Mutates ``batch``."""
        if batch.num_extend or batch.drafts is not None:
            self._prepare_ragged(batch)
        elif self.device.type == "cpu":
            self._prepare_decode_on_cpu(batch)
        else:
            groups = 1 + len(self.other_pages)
            sharing = [own is not None for own in shared_by_group(batch.shared, groups)]
            tensors = DecodeTensors(len(batch.slots), self.pages.shape[1], self.device, sharing)
            tensors.read(self.upload(*decode_arrays(batch, len(batch.slots)), updates=batch.page_updates))
            tensors.compute(self, batch.shared)
            tensors.give(batch)

    def _prepare_decode_on_cpu(self, batch: Batch) -> None:
        kv_lens = batch.prefix_lens + batch.extend_lens
        table = self.page_table[batch.slots, : -(-largest(kv_lens) // self.page_size)]
        places = batch.prefix_lens.astype(np.int64)
        if not batch.rows_version or self._decode_rows[0] != batch.rows_version:
            self._decode_rows = batch.rows_version, *_decode_rows(batch)
        _, row_of, slots, batch.qo_indptr = self._decode_rows
        arrays = places, self.locate(row_of, places, table), kv_lens, table
        batch.positions, batch.out_loc, batch.kv_lens, batch.page_table = map(torch.from_numpy, arrays)
        batch.input_ids = self.last_token[slots]
        batch.logit_rows = None
        own, *of_others = shared_by_group(batch.shared, 1 + len(self.other_tables))
        if own is not None:
            batch.page_table = _divide_table(batch, own, table, self.page_size)
        if self.other_tables:
            others = [other[batch.slots, : table.shape[1]] for other in self.other_tables]
            located = [torch.from_numpy(self.locate(row_of, places, other)) for other in others]
            tables = [
                torch.from_numpy(other) if shared is None else _divide_table(batch, shared, other, self.page_size)
                for other, shared in zip(others, of_others, strict=True)
            ]
            set_views(batch, zip(tables, located, strict=True))

    def _prepare_ragged(self, batch: Batch) -> None:
        kv_lens = batch.prefix_lens + batch.extend_lens
        width = -(-largest(kv_lens) // self.page_size)
        table = self.page_table[batch.slots, :width]
        others = [other[batch.slots, :width] for other in self.other_tables]
        indptr, row_of, places, positions = ragged(batch)
        if batch.drafts is not None and not batch.drafts.is_chain:
            batch.tree_mask = torch.from_numpy(tree_mask(batch, indptr)).to(self.device)
        fresh = indptr[batch.num_extend : -1].astype(np.int64)  # the first token of each decode or verify row
        slots = batch.slots.astype(np.int64)
        (
            batch.input_ids,
            batch.positions,
            batch.out_loc,
            batch.logit_rows,
            fresh_t,
            slots_t,
            batch.qo_indptr,
            batch.kv_lens,
            *other_locations,
        ) = self.upload(
            token_ids(batch, indptr),
            positions,
            self.locate(row_of, places, table),
            _logit_rows(batch, indptr),
            fresh,
            slots,
            indptr,
            kv_lens,
            *[self.locate(row_of, places, other) for other in others],
            updates=batch.page_updates,
        )
        on_cpu = self.device.type == "cpu"
        batch.page_table = torch.from_numpy(table) if on_cpu else self.pages[:, :width].index_select(0, slots_t)
        if len(fresh):
            batch.input_ids[fresh_t] = self.last_token[slots_t[batch.num_extend :]]
        if others:
            on_device = (pages[:, :width].index_select(0, slots_t) for pages in self.other_pages)
            tables = map(torch.from_numpy, others) if on_cpu else on_device
            set_views(batch, zip(tables, other_locations, strict=True))

    def locate(self, row_of: Int64Array, places: Int64Array, table: IntArray) -> Int64Array:
        """Return ``Batch.out_loc`` of tokens: token t is the token at index ``places[t]`` of the request in row
        ``row_of[t]``. ``table`` has the pages of each row."""
        page, offset = np.divmod(places, self.page_size)
        return table[row_of, page].astype(np.int64) * self.page_size + offset

    def locate_updates(self, updates: PageUpdates) -> None:
        """Compute what ``entries_of`` returns for these updates, so that it is ready when a step needs it."""
        if updates.version and updates.version == self._located_version:
            return
        entries: tuple[()] | tuple[Int64Array, IntArray] = ()
        if len(updates.slots) and self._has_pages:
            places = updates.slots.astype(np.int64) * self.page_table.shape[1] + updates.columns
            if self.other_tables:
                places = np.concatenate([places, (places + self._group_offsets).reshape(-1)])
            entries = places, self._flat_table[places]
        self._entries, self._located_version = entries, updates.version  # last, in case of an interrupt

    def upload(self, *arrays: Array, updates: PageUpdates) -> list[torch.Tensor]:
        """Return ``arrays`` on the device, and write ``updates`` into the device's page table. One copy sends both. On
        a CPU nothing is copied, because the device's page table is the host's."""
        if self.device.type == "cpu":
            return [torch.from_numpy(a) for a in arrays]
        entries = self.entries_of(updates)
        tensors = unpack(to_device(pack([*arrays, *entries]), self.device), [*arrays, *entries])
        if entries:
            self._flat_pages.index_copy_(0, tensors[-2], tensors[-1])
        return tensors[: len(arrays)]

    def entries_of(self, updates: PageUpdates) -> tuple[()] | tuple[Int64Array, IntArray]:
        """Return the flat indices of ``updates`` in ``all_pages`` (int64 ``[groups * updates]``), and the pages that the
        host's tables have there now. If an index occurs several times, its pages are therefore equal. Return an empty
        tuple if there are no updates."""
        self.locate_updates(updates)
        return self._entries

    def keep_last(self, batch: Batch, tokens: torch.Tensor) -> None:
        """Keep the last token of each sampled row for the next step. ``tokens`` is int64 ``[sampled rows, width]``."""
        slots = batch.slots if batch.samples.all() else batch.slots[batch.samples]
        last = tokens[:, -1]  # columns after the last accepted token repeat it, see ``verify.Accepted``
        self.last_token.index_copy_(0, to_device(slots.astype(np.int64), self.device), last)


def _decode_rows(batch: Batch) -> tuple[Int64Array, torch.Tensor, torch.Tensor]:
    """Return the row of each token of a decode batch, the rows' slots (int64) and ``Batch.qo_indptr``."""
    rows = len(batch.slots)
    indptr = torch.arange(rows + 1, dtype=torch.int32)
    return np.arange(rows), torch.from_numpy(batch.slots.astype(np.int64)), indptr


def shared_by_group(shared: SharedPrefixes | None, groups: int) -> tuple[SharedPrefixes | None, ...]:
    """Return for each of the cache groups with pages what its layers read once in a batch with ``shared``, None if each row
    reads its own keys."""
    if shared is None:
        return (None,) * groups
    return shared, *(shared.others or (None,) * (groups - 1))


def _divide_table(batch: Batch, groups: SharedPrefixes, table: IntArray, page_size: int) -> torch.Tensor:
    """Set the tensors of ``groups``, what a cache group shares, on the CPU. Return the pages of each row after the shared
    ones. ``table`` (int32 ``[rows, pages]``) has the pages of each row in the cache group."""
    width = table.shape[1]
    _, _, _, indptr, group_lens, row_lens = decode_arrays(batch, len(table))
    sources = groups.starts[:-1]
    if groups.window is not None:  # only the shortest row still has all pages that rows of the group see
        bounds = zip(groups.starts.tolist(), groups.starts.tolist()[1:], strict=False)
        sources = np.array([start + batch.prefix_lens[start:stop].argmin() for start, stop in bounds])
        first_positions = np.zeros(len(table), np.int32)
        first_positions[: len(sources)] = batch.prefix_lens[sources]
        groups.first_positions = torch.from_numpy(first_positions)
    group_table = np.zeros_like(table)
    group_table[: len(groups.lens)] = table[sources]
    columns = np.minimum(np.arange(width) + row_lens[:, None] // page_size, width - 1)
    arrays = indptr, group_lens, group_table, np.take_along_axis(table, columns, 1)
    groups.indptr, groups.group_lens, groups.group_table, groups.own_table = map(torch.from_numpy, arrays)
    groups.own_lens = batch.kv_lens - torch.from_numpy(row_lens)
    return groups.own_table


class GroupTensors(NamedTuple):
    """Hold the device tensors of a decode step for one cache group with pages. ``table`` has the pages of each row, and
    ``group_table`` those that a group of rows shares, if the cache group may share; ``table`` then has the others."""

    table: torch.Tensor
    out_loc: torch.Tensor
    group_table: torch.Tensor

    def narrow(self, rows: int) -> GroupTensors:
        """Return views of the first rows."""
        return GroupTensors(self.table[:rows], self.out_loc[:rows], self.group_table[:rows])


class DecodeTensors:
    """Hold the device tensors of a decode step of up to ``rows`` rows: the tensors of the batch, and the arrays from
    which they are computed.

    All replays of a graph use the same tensors, so that their addresses do not change. A step that is launched kernel
    by kernel has its own.
    """

    def __init__(
        self,
        rows: int,
        max_pages: int,
        device: torch.device,
        sharing: Sequence[bool],
        state_groups: int = 0,
    ) -> None:
        """``sharing`` has an entry for each cache group with pages: True if batches may share prefixes there. With
        ``state_groups``, the slots of the rows' states are computed too; they are of steps of fixed addresses."""
        self.rows = rows
        self.state_slots = torch.zeros(state_groups, rows, dtype=torch.int32, device=device)
        places = torch.zeros(2 + len(sharing), rows, dtype=torch.int64, device=device)
        self.input_ids, self.positions, *out_locs = places.unbind(0)
        self.kv_lens = torch.ones(rows, dtype=torch.int32, device=device)
        self.qo_indptr = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.own_lens = torch.ones_like(self.kv_lens)
        self.first_positions = torch.empty_like(self.kv_lens)
        tables = torch.zeros(len(sharing), rows, max_pages, dtype=torch.int32, device=device).unbind(0)
        self.groups = [
            GroupTensors(table, out_loc, torch.zeros_like(table) if shares else table)
            for table, out_loc, shares in zip(tables, out_locs, sharing, strict=True)
        ]

    def read(self, sent: Sequence[torch.Tensor]) -> None:
        """Refer to ``sent``, the arrays of ``decode_arrays`` on the device. For a graph they are views of a fixed
        buffer."""
        self.uniform, self.slots, self.prefix_lens, self.indptr, self.group_lens, self.row_lens = sent

    def narrow(self, rows: int) -> DecodeTensors:
        """Return tensors for a step of ``rows`` rows. They are views of the first rows of these."""
        part = copy.copy(self)
        part.rows, part.qo_indptr = rows, self.qo_indptr[: rows + 1]
        for name in ("input_ids", "positions", "kv_lens", "own_lens", "first_positions"):
            setattr(part, name, getattr(self, name)[:rows])
        part.groups = [own.narrow(rows) for own in self.groups]
        part.state_slots = self.state_slots[:, :rows]
        return part

    def compute(self, inputs: Inputs, shared: SharedPrefixes | None) -> None:
        """Launch the kernels that fill the tensors of a batch with ``shared``. They also read the arrays of ``inputs`` that are
        indexed by slot."""
        from dovetail.ops.triton.inputs import decode_inputs

        all_shared = shared_by_group(shared, len(self.groups))
        sent = self.slots, self.prefix_lens, inputs.last_token
        for pages, own, prefixes in zip((inputs.pages, *inputs.other_pages), self.groups, all_shared, strict=True):
            out = self.input_ids, self.positions, own.out_loc, self.kv_lens, own.table
            if prefixes is None:
                decode_inputs(*sent, pages, inputs.page_size, out)
                continue
            groups = self.row_lens, self.indptr, self.group_lens, own.group_table, self.own_lens
            first = None if prefixes.window is None else self.first_positions
            decode_inputs(*sent, pages, inputs.page_size, out, groups, first)
        for group, slots in enumerate(self.state_slots):
            assert inputs.states is not None
            slots.copy_(inputs.states.slots[group].index_select(0, self.slots))

    def give(self, batch: Batch) -> None:
        """Set the batch's engine fields to these tensors."""
        first, *others = self.groups
        batch.input_ids, batch.positions, batch.out_loc = self.input_ids, self.positions, first.out_loc
        batch.qo_indptr, batch.kv_lens, batch.page_table = self.qo_indptr, self.kv_lens, first.table
        batch.logit_rows = None
        if batch.shared is not None:
            for shared, own in zip(shared_by_group(batch.shared, len(self.groups)), self.groups, strict=True):
                if shared is not None:
                    shared.indptr, shared.group_lens, shared.group_table = self.indptr, self.group_lens, own.group_table
                    shared.own_lens, shared.own_table = self.own_lens, own.table
                    shared.first_positions = self.first_positions
        if others:
            set_views(batch, [(own.table, own.out_loc) for own in others])


def largest(lens: IntArray) -> int:
    """Return the largest of ``lens``. For up to a few hundred rows this takes a third of the time of ``lens.max()``."""
    return int(lens[lens.argmax()])


def decode_arrays(batch: Batch, rows: int, uniform: Array | None = None) -> tuple[Array, ...]:
    """Return the arrays that the host sends for a decode batch, padded to ``rows`` rows with slot 0: random numbers
    (float64), slots (int64), prefix lengths, and for shared prefixes indptr, group_lens and row_lens (all int32, see
    ``DecodeTensors.read``)."""
    real = len(batch.slots)
    numbers = np.zeros(rows, np.float64)
    if uniform is not None:
        numbers[: len(uniform)] = uniform
    slots, prefix_lens = np.zeros(rows, np.int64), np.zeros(rows, np.int32)
    slots[:real], prefix_lens[:real] = batch.slots, batch.prefix_lens
    indptr, group_lens, row_lens = np.full(rows + 1, rows, np.int32), np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    indptr[0] = 0  # group 0 has all rows, unless prefixes are shared
    shared = batch.shared
    if shared is not None:
        indptr[: len(shared.starts)] = shared.starts  # the group after these has the padding rows
        group_lens[: len(shared.lens)] = shared.lens
        row_lens[:real] = np.repeat(shared.lens, np.diff(shared.starts))
    return numbers, slots, prefix_lens, indptr, group_lens, row_lens


def pack(arrays: Sequence[Array]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of ``arrays`` in one array. Each of them begins at a multiple of 8 bytes."""
    if len(arrays) == 1:
        return arrays[0].reshape(-1).view(np.uint8)
    packed = np.empty(sum(_aligned(a.nbytes) for a in arrays), np.uint8)
    start = 0
    for a in arrays:
        packed[start : start + a.nbytes] = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
        start += _aligned(a.nbytes)
    return packed


def unpack(buffer: torch.Tensor, like: Sequence[Array]) -> list[torch.Tensor]:
    """Return views of ``buffer``, which holds the bytes of ``pack(like)``, with the shapes and dtypes of ``like``."""
    out, start = [], 0
    for a in like:
        out.append(buffer[start : start + a.nbytes].view(_TORCH[a.dtype]).view(a.shape))
        start += _aligned(a.nbytes)
    return out


def _aligned(size: int) -> int:
    return -(-size // 8) * 8


class Ragged(NamedTuple):
    """Hold the rows and positions of a batch's tokens. Rows can have different numbers of tokens; the tokens of a row
    follow those of the row before it."""

    indptr: IntArray  # [rows + 1] row r has tokens [indptr[r], indptr[r + 1])
    row_of: Int64Array  # [tokens]
    places: Int64Array  # [tokens] index in the request, which selects the location of K and V
    positions: Int64Array  # [tokens] equal to places, but by depth for drafts in a tree


def ragged(batch: Batch) -> Ragged:
    """Return the rows and positions of the tokens of a batch whose host fields are set."""
    lens = batch.extend_lens
    indptr = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(lens, out=indptr[1:])
    row_of = np.repeat(np.arange(len(lens)), lens)
    local = np.arange(indptr[-1]) - indptr[row_of]
    places = positions = batch.prefix_lens[row_of] + local
    if batch.drafts is not None and not batch.drafts.is_chain:
        positions = (batch.prefix_lens[row_of] + depths(batch)[row_of, local]).astype(np.int64)
    return Ragged(indptr, row_of, places, positions)


def token_ids(batch: Batch, indptr: IntArray) -> Int64Array:
    """Return the tokens of a batch, int64 ``[tokens]``: those of extend rows, and the drafts. The first token of a
    decode or verify row is 0, because only the device has it."""
    ids = np.zeros(int(indptr[-1]), np.int64)
    for row in range(batch.num_extend):
        start = int(batch.prefix_lens[row])
        ids[indptr[row] : indptr[row + 1]] = batch.reqs[row].token_ids[start : start + int(batch.extend_lens[row])]
    if batch.drafts is not None:
        for row in range(batch.num_extend, len(batch.slots)):
            count = batch.drafts.lens[row]
            ids[indptr[row] + 1 : indptr[row + 1]] = batch.drafts.token_ids[row, :count]
    return ids


def _logit_rows(batch: Batch, indptr: IntArray) -> Int64Array:
    """Return the tokens whose logits are needed: the last one of each sampled row, and every token of a verify row."""
    last = indptr[1:].astype(np.int64) - 1
    if batch.drafts is None:
        return last[batch.samples]
    split = batch.num_extend
    return np.concatenate([last[:split][batch.samples[:split]], np.arange(indptr[split], indptr[-1], dtype=np.int64)])


def depths(batch: Batch) -> IntArray:
    """Return the depth of each token of each row in its tree, int32 ``[rows, longest row]``. The root has depth 0. In
    extend rows the depth of a token is its index in the row."""
    drafts: DraftTree | None = batch.drafts
    assert drafts is not None
    out = np.tile(np.arange(int(batch.extend_lens.max()), dtype=np.int32), (len(batch.slots), 1))
    rows = np.arange(batch.num_extend, len(batch.slots))
    for node in range(drafts.parents.shape[1]):
        out[rows, node + 1] = out[rows, drafts.parents[rows, node] + 1] + 1
    return out


def tree_mask(batch: Batch, indptr: IntArray) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return the mask that ``AttentionBackend.plan`` describes, bool ``[tokens, longest row]``. A draft sees the root,
    its ancestors and itself. In extend rows, a token sees itself and the tokens before it."""
    drafts: DraftTree | None = batch.drafts
    assert drafts is not None
    split, longest = batch.num_extend, 1 + int(drafts.lens.max())
    mask = np.zeros((int(indptr[-1]), int(batch.extend_lens.max())), np.bool_)
    for row in range(split):
        view = mask[indptr[row] : indptr[row + 1]]
        view[:] = np.tri(*view.shape, dtype=np.bool_)
    parents, lens = drafts.parents[split:], batch.extend_lens[split:]
    rows = np.arange(len(parents))
    own = np.zeros((len(rows), longest, longest), np.bool_)
    own[:, 0, 0] = True
    for node in range(1, longest):  # for all rows at once; nodes that a row does not have are dropped below
        own[:, node] = own[rows, parents[:, node - 1] + 1]
        own[:, node, node] = True
    mask[indptr[split] :, :longest] = own[np.arange(longest) < lens[:, None]]
    return mask
