"""The inputs of a verify step at fixed addresses: rows with drafts, filled up to a number of tokens.

How many queries each row has is part of the inputs, so that one graph serves rows of every length. Each token that fills
the step up is a row of its own, of slot 0: it reads page 0 and writes to page 0. All other rows that it has too many have no
query.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dovetail.engine.captures import NO_UPDATES
from dovetail.engine.inputs import DecodeTensors, Inputs, ragged, token_ids, tree_mask
from dovetail.types import Batch, DraftTree

if TYPE_CHECKING:
    import torch

    from dovetail.engine.inputs import Array
    from dovetail.types import IntArray


def verify_arrays(batch: Batch, inputs: Inputs, tokens: int, tree_width: int | None) -> tuple[Array, ...]:
    """What the host sends of a batch of verify rows, filled up to ``tokens`` tokens and as many rows: see ``VerifyTensors``.
    With ``tree_width``, as wide as the longest row can be, also the tree mask. Reads the host's page table."""
    rows, (own_indptr, row_of, places, own_positions) = len(batch.slots), ragged(batch)
    total, indptr, kv_lens = len(places), row_starts(own_indptr, tokens), batch.prefix_lens + batch.extend_lens
    table = inputs.page_table[batch.slots, : -(-int(kv_lens.max(initial=0)) // inputs.page_size)]
    ids = np.zeros(tokens + 1, np.int64)
    positions, out_loc, slots = np.zeros((3, tokens), np.int64)
    roots, last = np.full(tokens, tokens), np.zeros(tokens, np.int32)
    ids[:total] = token_ids(batch, own_indptr)
    positions[:total], out_loc[:total] = own_positions, inputs.locate(row_of, places, table)
    slots[:rows], roots[:rows], last[:rows] = batch.slots, own_indptr[:-1], kv_lens - 1
    arrays = ids, roots, slots, last, positions, out_loc, indptr
    return arrays if tree_width is None else (*arrays, _wide_mask(batch, own_indptr, tokens, tree_width))


def row_starts(own_indptr: IntArray, tokens: int) -> IntArray:
    """``qo_indptr`` of a batch, int32 ``[rows + 1]``, filled up to ``tokens`` tokens and as many rows, int32 ``[tokens + 1]``."""
    indptr = np.full(tokens + 1, tokens, np.int32)
    rows, total = len(own_indptr), int(own_indptr[-1])
    indptr[:rows] = own_indptr
    indptr[rows : rows + tokens - total] = np.arange(total + 1, tokens + 1)
    return indptr


def _wide_mask(batch: Batch, indptr: IntArray, tokens: int, width: int) -> Array:
    mask, total = np.zeros((tokens, width), np.bool_), int(indptr[-1])
    if batch.drafts is not None:
        own = tree_mask(batch, indptr)
        mask[:total, : own.shape[1]] = own
    mask[total:, 0] = True
    return mask


def empty_batch() -> Batch:
    """No rows: a step in which every token fills up."""
    nothing = np.zeros(0, np.int32)
    return Batch([], 0, nothing, nothing, nothing, nothing.astype(np.bool_), NO_UPDATES)


class VerifyTensors:
    """Device tensors of a verify step: what the host sent, and what is computed from it and from the arrays by slot."""

    def __init__(self, rows: DecodeTensors, sent: Sequence[torch.Tensor]) -> None:
        """``rows`` has a row for each token. ``sent`` are the arrays of ``verify_arrays`` on the device: ids ``[tokens + 1]``,
        of which the last is nobody's; the token at which each row's last token enters (``tokens``: none); its slot; the
        place of its last query; positions, places in the pool, ``qo_indptr``, and the tree mask where there is one."""
        self.ids, self.roots, slots, last, self.positions, self.out_loc, self.qo_indptr, *mask = sent
        self.tree_mask = mask[0] if mask else None
        self.rows = rows
        self.rows.slots, self.rows.prefix_lens = slots, last

    def compute(self, inputs: Inputs) -> None:
        """Fill lengths and page tables of the rows, and the token that each was last given."""
        self.rows.compute(inputs, shared=False)  # as if each row decoded at the place of its last query
        self.ids.index_copy_(0, self.roots, self.rows.input_ids)

    def give(self, batch: Batch, tokens: int) -> None:
        """Set the engine fields of a batch of so many tokens."""
        rows = len(batch.slots)
        batch.input_ids, batch.positions, batch.out_loc = (
            self.ids[:tokens],
            self.positions[:tokens],
            self.out_loc[:tokens],
        )
        batch.qo_indptr, batch.kv_lens = self.qo_indptr[: rows + 1], self.rows.kv_lens[:rows]
        batch.page_table = self.rows.table[:rows]
        batch.tree_mask = None if self.tree_mask is None else self.tree_mask[:tokens]
        batch.logit_rows = None


def static_batch(tensors: VerifyTensors, width: int, context_len: int) -> Batch:
    """The batch that is planned and captured: each row has the most queries and the longest context, on the host."""
    rows = tensors.rows.rows
    slots = np.zeros(rows, np.int32)
    lens = np.full(rows, width, np.int32)
    batch = Batch([], 0, slots, context_len - lens, lens, slots == 0, NO_UPDATES)
    drafts = np.zeros((rows, width - 1), np.int32)
    batch.drafts = DraftTree(drafts, drafts + np.arange(-1, width - 2, dtype=np.int32), lens - 1)
    tensors.give(batch, rows)
    return batch


def set_lens(static: Batch, batch: Batch) -> None:
    """Set the host's lengths of a ``static_batch`` to those of ``batch``, filled up: each token that does so is a row."""
    rows, fill = len(batch.slots), len(static.slots) - batch.num_tokens
    static.prefix_lens[:rows], static.prefix_lens[rows:] = batch.prefix_lens, 0
    static.extend_lens[:rows], static.extend_lens[rows : rows + fill] = batch.extend_lens, 1
    static.extend_lens[rows + fill :] = 0
