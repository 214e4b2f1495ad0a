"""From a batch of requests to the tensors of a forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from dovetail.types import Batch, DraftTree, IntArray

Int64Array = np.ndarray[Any, np.dtype[np.int64]]


class Inputs:
    """What the device keeps between steps, by slot: the last token and the page table. ``prepare`` fills a batch.

    Host arrays are computed with numpy and go to the device in one copy.
    """

    def __init__(self, num_slots: int, max_pages: int, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self.device = device
        self.page_table: IntArray = np.zeros((num_slots + 1, max_pages), np.int32)
        self.last_token = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)

    def prepare(self, batch: Batch) -> None:
        """Set the batch's engine fields. Mutates ``batch`` and the page table."""
        updates = batch.page_updates
        if len(updates.slots):
            self.page_table[updates.slots, updates.columns] = updates.pages[0]
        kv_lens = batch.prefix_lens + batch.extend_lens
        table = self.page_table[batch.slots, : -(-int(kv_lens.max()) // self.page_size)]
        if batch.num_extend == 0 and batch.drafts is None:
            self._prepare_decode(batch, kv_lens, table)
        else:
            self._prepare_ragged(batch, kv_lens, table)

    def _prepare_decode(self, batch: Batch, kv_lens: IntArray, table: IntArray) -> None:
        rows = len(batch.reqs)
        places = batch.prefix_lens.astype(np.int64)
        out_loc = self._places(np.arange(rows), places, table)
        indptr = np.arange(rows + 1, dtype=np.int32)
        slots = batch.slots.astype(np.int64)
        batch.positions, batch.out_loc, slots_t, batch.qo_indptr, batch.kv_lens, batch.page_table = self._upload(
            places, out_loc, slots, indptr, kv_lens, table
        )
        batch.input_ids = self.last_token[slots_t]
        batch.logit_rows = None

    def _prepare_ragged(self, batch: Batch, kv_lens: IntArray, table: IntArray) -> None:
        lens = batch.extend_lens
        indptr = np.zeros(len(lens) + 1, np.int32)
        np.cumsum(lens, out=indptr[1:])
        row_of = np.repeat(np.arange(len(lens)), lens)
        local = np.arange(indptr[-1]) - indptr[row_of]
        places = batch.prefix_lens[row_of] + local
        positions = places
        if batch.drafts is not None and not batch.drafts.is_chain:
            positions = batch.prefix_lens[row_of] + depths(batch)[row_of, local]
            batch.tree_mask = torch.from_numpy(tree_mask(batch, indptr)).to(self.device)
        out_loc = self._places(row_of, places, table)
        logit_rows = _logit_rows(batch, indptr)
        fresh = indptr[batch.num_extend : -1].astype(np.int64)  # where a token sampled in an earlier step enters
        slots = batch.slots[batch.num_extend :].astype(np.int64)
        (
            batch.input_ids,
            batch.positions,
            batch.out_loc,
            batch.logit_rows,
            fresh_t,
            slots_t,
            batch.qo_indptr,
            batch.kv_lens,
            batch.page_table,
        ) = self._upload(
            _input_ids(batch, indptr),
            positions.astype(np.int64),
            out_loc,
            logit_rows,
            fresh,
            slots,
            indptr,
            kv_lens,
            table,
        )
        if len(fresh):
            batch.input_ids[fresh_t] = self.last_token[slots_t]

    def _places(self, row_of: Int64Array, places: Int64Array, table: IntArray) -> Int64Array:
        page, offset = np.divmod(places, self.page_size)
        return table[row_of, page].astype(np.int64) * self.page_size + offset

    def _upload(self, *arrays: np.ndarray[Any, Any]) -> list[torch.Tensor]:
        if self.device.type == "cpu":
            return [torch.from_numpy(a) for a in arrays]
        packed = np.concatenate([np.ascontiguousarray(a).view(np.uint8).ravel() for a in arrays])
        buffer = torch.from_numpy(packed).pin_memory().to(self.device, non_blocking=True)
        out, start = [], 0
        for a in arrays:
            dtype = torch.int64 if a.dtype == np.int64 else torch.int32
            out.append(buffer[start : start + a.nbytes].view(dtype).view(a.shape))
            start += a.nbytes
        return out


def _input_ids(batch: Batch, indptr: IntArray) -> Int64Array:
    """Tokens of the extend rows and drafts; a place whose token only the device knows is left 0."""
    ids = np.zeros(int(indptr[-1]), np.int64)
    for row in range(batch.num_extend):
        start = int(batch.prefix_lens[row])
        ids[indptr[row] : indptr[row + 1]] = batch.reqs[row].token_ids[start : start + int(batch.extend_lens[row])]
    if batch.drafts is not None:
        for row in range(batch.num_extend, len(batch.reqs)):
            count = batch.drafts.lens[row]
            ids[indptr[row] + 1 : indptr[row + 1]] = batch.drafts.token_ids[row, :count]
    return ids


def _logit_rows(batch: Batch, indptr: IntArray) -> Int64Array:
    """Tokens whose logits are needed: the last of each sampled row, and every token of a verify row."""
    last = indptr[1:].astype(np.int64) - 1
    if batch.drafts is None:
        return last[batch.samples]
    split = batch.num_extend
    return np.concatenate([last[:split][batch.samples[:split]], np.arange(indptr[split], indptr[-1], dtype=np.int64)])


def depths(batch: Batch) -> IntArray:
    """Depth of each token of each row in its tree, int32 ``[rows, longest row]``; a token of an extend row, and the root,
    stand at their own index."""
    drafts: DraftTree | None = batch.drafts
    assert drafts is not None
    out = np.tile(np.arange(int(batch.extend_lens.max()), dtype=np.int32), (len(batch.reqs), 1))
    rows = np.arange(batch.num_extend, len(batch.reqs))
    for node in range(drafts.parents.shape[1]):
        out[rows, node + 1] = out[rows, drafts.parents[rows, node] + 1] + 1
    return out


def tree_mask(batch: Batch, indptr: IntArray) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """See ``AttentionBackend.plan``: bool ``[tokens, longest row]``; a draft sees the root, its ancestors and itself."""
    drafts: DraftTree | None = batch.drafts
    assert drafts is not None
    width = int(batch.extend_lens.max())
    mask = np.zeros((int(indptr[-1]), width), np.bool_)
    for row in range(len(batch.reqs)):
        view = mask[indptr[row] : indptr[row + 1]]
        if row < batch.num_extend:
            view[:] = np.tri(len(view), width, dtype=np.bool_)
            continue
        view[0, 0] = True
        for node in range(len(view) - 1):
            view[node + 1] = view[drafts.parents[row, node] + 1]
            view[node + 1, node + 1] = True
    return mask
