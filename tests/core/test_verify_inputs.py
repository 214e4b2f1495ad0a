"""What the host sends of a verify step: real rows first, and around them nothing but page 0.

.venv/bin/python -m pytest -q tests/core/test_verify_inputs.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dovetail.engine.inputs import Inputs, pack, tree_mask, unpack
from dovetail.engine.verify_inputs import empty_batch, row_starts, set_lens, static_batch, verify_arrays
from dovetail.testing.batches import make_batch, make_page_table, make_tree_mask
from dovetail.types import DraftTree

PAGE = 4


def random_batch(seed, prompts=0):
    """Verify rows behind so many prompts, and the pages of all."""
    rng = np.random.default_rng(seed)
    rows, k = prompts + int(rng.integers(1, 6)), int(rng.integers(1, 8))
    lens = rng.integers(0, k + 1, rows).astype(np.int32)
    lens[:prompts], lens[-1] = 0, k
    parents = np.stack([[rng.integers(-1, j) if j else -1 for j in range(k)] for _ in range(rows)]).astype(np.int32)
    extend, prefix = 1 + lens, rng.integers(0, 40, rows)
    extend[:prompts] = rng.integers(1, 20, prompts)
    table = make_page_table((prefix + extend).tolist(), PAGE, 200, seed=seed)
    drafts = DraftTree(rng.integers(5, 90, (rows, k)).astype(np.int32), parents, lens)
    return make_batch(PAGE, table, prefix, extend, num_extend=prompts, drafts=drafts), table


@pytest.mark.parametrize("prompts", [0, 2])
@pytest.mark.parametrize("seed", range(20))
def test_tree_masks_say_what_the_definition_says(seed, prompts):
    batch, _ = random_batch(seed, prompts)
    assert np.array_equal(tree_mask(batch, batch.qo_indptr.numpy()), make_tree_mask(batch, batch.drafts))


@pytest.mark.parametrize("seed", range(20))
def test_real_rows_come_first_and_all_else_is_page_0(seed):
    batch, table = random_batch(seed)
    rows, total, width = len(batch.slots), batch.num_tokens, int(batch.extend_lens.max())
    tokens = total + seed % 7
    inputs = Inputs(9, table.shape[1], PAGE, torch.device("cpu"))
    batch.slots = np.random.default_rng(seed).permutation(np.arange(1, 10))[:rows].astype(np.int32)
    inputs.page_table[batch.slots] = table
    ids, roots, slots, last, positions, out_loc, indptr, mask = verify_arrays(batch, inputs, tokens, width + 2)

    assert indptr[: rows + 1].tolist() == batch.qo_indptr.tolist()
    assert positions[:total].tolist() == batch.positions.tolist()
    assert out_loc[:total].tolist() == batch.out_loc.tolist()
    assert np.array_equal(last[:rows] + 1, batch.kv_lens.numpy())
    assert np.array_equal(slots[:rows], batch.slots)
    assert np.array_equal(roots[:rows], indptr[:rows])
    for row in range(rows):
        drafted = batch.drafts.token_ids[row, : batch.drafts.lens[row]]
        assert np.array_equal(ids[indptr[row] + 1 : indptr[row + 1]], drafted)
    assert np.array_equal(mask[:total, :width], make_tree_mask(batch, batch.drafts))
    assert not mask[:, width:].any()

    queries = np.diff(indptr)
    assert queries[rows:].tolist() == [1] * (tokens - total) + [0] * (total - rows)
    assert indptr[-1] == tokens
    assert not slots[rows:].any()
    assert not last[rows:].any()
    assert not out_loc[total:].any()
    assert not positions[total:].any()
    assert (roots[rows:] == tokens).all(), "the last id is nobody's"
    assert mask[total:].tolist() == [[True] + [False] * (width + 1)] * (tokens - total)


def test_a_step_without_rows_is_padding_alone():
    inputs = Inputs(3, 5, PAGE, torch.device("cpu"))
    arrays = verify_arrays(empty_batch(), inputs, 6, 3)
    assert row_starts(np.zeros(1, np.int32), 6).tolist() == list(range(7))
    for sent, array in zip(unpack(torch.from_numpy(pack(arrays)), arrays), arrays, strict=True):
        assert np.array_equal(sent.numpy(), array)


def test_lengths_of_a_planned_batch_follow_the_step():
    batch, _ = random_batch(3)
    tokens, width = batch.num_tokens + 2, int(batch.extend_lens.max())

    class Tensors:
        rows = type("Rows", (), {"rows": tokens})

        def give(self, batch, tokens):
            """No tensors are needed."""

    static = static_batch(Tensors(), width, 100)
    assert (static.extend_lens == width).all()
    assert (static.prefix_lens + static.extend_lens == 100).all()
    assert static.drafts.is_chain
    set_lens(static, batch)
    rows = len(batch.slots)
    assert np.array_equal(static.prefix_lens[:rows], batch.prefix_lens)
    assert not static.prefix_lens[rows:].any()
    assert static.extend_lens.sum() == tokens
    assert np.array_equal(static.extend_lens[:rows], batch.extend_lens)
