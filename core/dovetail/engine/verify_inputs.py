"""The inputs of a verify step at fixed addresses: rows with drafts, filled up to a number of tokens.

How many queries each row has is part of the inputs, so that one graph serves rows of every length. Each token that fills
the step up is a row of its own, of slot 0: it reads page 0 and writes to page 0. All other rows that it has too many have no
query.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch

from dovetail.engine.captures import NO_UPDATES
from dovetail.types import Batch, DraftTree

if TYPE_CHECKING:
    from dovetail.engine.inputs import Inputs
    from dovetail.types import IntArray


Numbers = TypeVar("Numbers", torch.Tensor, "IntArray")


class VerifyShape(NamedTuple):
    """Of a captured step: how many tokens, and rows at most; queries of a row at most; whether drafts may be trees."""

    tokens: int
    width: int
    tree: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers in each part of what the host sends, see ``parts``."""
        drafts = self.tokens * (self.width - 1)
        return self.tokens + 1, self.tokens, self.tokens, drafts, drafts * self.tree

    def parts(self, block: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers, Numbers]:
        """Views of ``block`` int32 ``[sum(sizes)]``: ``qo_indptr [tokens + 1]``; of each row its slot and its KV tokens
        ``[tokens]``, its drafts ``[tokens, width - 1]`` and, of trees, their parents."""
        found, start = [], 0
        for size in self.sizes:
            found.append(block[start : start + size])
            start += size
        indptr, slots, lens, drafts, parents = found
        columns = self.width - 1
        return indptr, slots, lens, drafts.reshape(self.tokens, columns), parents.reshape(-1, columns)


def verify_block(batch: Batch, shape: VerifyShape) -> IntArray:
    """What the host sends of a batch of verify rows, filled up: see ``VerifyShape.parts``."""
    block: IntArray = np.zeros(sum(shape.sizes), np.int32)
    indptr, slots, lens, drafts, parents = shape.parts(block)
    rows, tokens = len(batch.slots), shape.tokens
    np.cumsum(batch.extend_lens, out=indptr[1 : rows + 1])
    total = int(indptr[rows])
    fill = rows + tokens - total
    indptr[rows + 1 : fill + 1] = np.arange(total + 1, tokens + 1)
    indptr[fill + 1 :] = tokens
    slots[:rows] = batch.slots
    np.add(batch.prefix_lens, batch.extend_lens, out=lens[:rows])
    lens[rows:] = 1
    if batch.drafts is not None:
        count = batch.drafts.token_ids.shape[1]
        drafts[:rows, :count] = batch.drafts.token_ids
        if shape.tree:
            parents[:rows, :count] = batch.drafts.parents
    return block


def empty_batch() -> Batch:
    """No rows: a step in which every token fills up."""
    nothing = np.zeros(0, np.int32)
    return Batch([], 0, nothing, nothing, nothing, nothing.astype(np.bool_), NO_UPDATES)


class VerifyMemory:
    """Device tensors of the largest verify step; smaller ones use their beginning."""

    def __init__(self, shape: VerifyShape, max_pages: int, device: torch.device) -> None:
        tokens = shape.tokens
        self.input_ids, self.positions, self.out_loc = torch.zeros(3, tokens, dtype=torch.int64, device=device)
        self.kv_lens = torch.ones(tokens, dtype=torch.int32, device=device)
        self.table = torch.zeros(tokens, max_pages, dtype=torch.int32, device=device)
        self.mask = torch.zeros(tokens if shape.tree else 0, shape.width, dtype=torch.bool, device=device)


class VerifyTensors:
    """Device tensors of a verify step: what the host sent, and what is computed from it and from the arrays by slot."""

    def __init__(self, shape: VerifyShape, memory: VerifyMemory, block: torch.Tensor) -> None:
        """``block`` is that of ``verify_block``, on the device."""
        tokens = shape.tokens
        indptr, slots, lens, drafts, parents = shape.parts(block)
        self._sent = indptr, slots, lens, drafts, parents if shape.tree else None
        self._computed = (
            memory.input_ids[:tokens],
            memory.positions[:tokens],
            memory.out_loc[:tokens],
            memory.kv_lens[:tokens],
            memory.table[:tokens],
        )
        self._mask = memory.mask[:tokens] if shape.tree else None

    def compute(self, inputs: Inputs) -> None:
        """Launch the kernel that fills the step's tensors. Reads the arrays by slot."""
        from dovetail.ops.triton.inputs import verify_inputs

        mask = None if self._mask is None else self._mask.view(torch.uint8)
        verify_inputs(self._sent, inputs.last_token, inputs.pages, inputs.page_size, self._computed, mask)

    def give(self, batch: Batch, rows: int, tokens: int) -> None:
        """Set the engine fields of a batch of so many rows and tokens."""
        ids, positions, out_loc, kv_lens, table = self._computed
        batch.input_ids, batch.positions, batch.out_loc = ids[:tokens], positions[:tokens], out_loc[:tokens]
        batch.qo_indptr, batch.kv_lens, batch.page_table = self._sent[0][: rows + 1], kv_lens[:rows], table[:rows]
        batch.tree_mask = None if self._mask is None else self._mask[:tokens]
        batch.logit_rows = None


def static_batch(shape: VerifyShape, context_len: int) -> Batch:
    """The batch that is planned and captured: each row has the most queries and the longest context, on the host."""
    slots = np.zeros(shape.tokens, np.int32)
    lens = np.full(shape.tokens, shape.width, np.int32)
    batch = Batch([], 0, slots, context_len - lens, lens, slots == 0, NO_UPDATES)
    batch.drafts = DraftTree.chains(np.zeros((shape.tokens, shape.width - 1), np.int32), lens - 1)
    return batch


def set_lens(static: Batch, batch: Batch, tokens: int) -> None:
    """Set the host's lengths of a ``static_batch`` to those of ``batch``, so many tokens, filled up: each token that does so is
    a row."""
    rows, fill = len(batch.slots), len(static.slots) - tokens
    static.prefix_lens[:rows], static.prefix_lens[rows:] = batch.prefix_lens, 0
    static.extend_lens[:rows], static.extend_lens[rows : rows + fill] = batch.extend_lens, 1
    static.extend_lens[rows + fill :] = 0
