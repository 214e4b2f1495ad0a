"""The inputs of a decode step, computed on the device from slots and lengths.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_inputs_triton.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dovetail.engine.inputs import DecodeTensors, Inputs, decode_arrays, pack, unpack
from dovetail.types import Batch, PageUpdates, SharedPrefixes

NOTHING = np.zeros(0, np.int32)
NO_UPDATES = PageUpdates(NOTHING, NOTHING, np.zeros((1, 0), np.int32))


def decode_batch(slots, prefix_lens, shared=None):
    rows = len(slots)
    ones = np.ones(rows, np.int32)
    batch = Batch([], 0, np.array(slots, np.int32), np.array(prefix_lens, np.int32), ones, ones > 0, NO_UPDATES)
    batch.shared = shared
    return batch


def run(inputs, batch, rows):
    tensors = DecodeTensors(rows, inputs.pages.shape[1], inputs.device, batch.shared is not None)
    arrays = decode_arrays(batch, rows)
    tensors.read(unpack(torch.from_numpy(pack(arrays)), arrays))
    tensors.compute(inputs, shared=batch.shared is not None)
    tensors.give(batch)
    return batch


@pytest.fixture
def inputs():
    inputs = Inputs(6, 400, 4, torch.device("cpu"))
    inputs.page_table[1:] = np.random.default_rng(0).permutation(6 * 400).reshape(6, 400) + 1
    inputs.last_token[1:] = torch.arange(6) + 100
    return inputs


@pytest.mark.parametrize("rows", [4, 7])
def test_rows_continue_their_slots_and_padding_reads_page_0(inputs, rows):
    slots, prefix = [3, 1, 6, 2], [0, 3, 4, 1599]
    batch = run(inputs, decode_batch(slots, prefix), rows)
    pad = rows - 4
    assert batch.input_ids.tolist() == [102, 100, 105, 101] + [0] * pad
    assert batch.positions.tolist() == prefix + [0] * pad
    assert batch.kv_lens.tolist() == [n + 1 for n in prefix] + [1] * pad
    expected = [int(inputs.page_table[s, n // 4]) * 4 + n % 4 for s, n in zip(slots, prefix, strict=True)]
    assert batch.out_loc.tolist() == expected + [0] * pad
    for row, (slot, n) in enumerate(zip(slots, prefix, strict=True)):
        assert (batch.page_table[row, : n // 4 + 1].numpy() == inputs.page_table[slot, : n // 4 + 1]).all()


@pytest.mark.parametrize("rows", [5, 8])
def test_shared_prefixes_are_split_from_what_is_own(inputs, rows):
    inputs.page_table[2, :2] = inputs.page_table[5, :2] = inputs.page_table[4, :2]
    shared = SharedPrefixes(np.array([0, 1, 4, 5], np.int32), np.array([0, 8, 0], np.int32))
    slots, prefix = [1, 4, 2, 5, 3], [9, 8, 30, 11, 2]
    batch = run(inputs, decode_batch(slots, prefix, shared), rows)
    groups = batch.shared
    assert groups is not None
    assert groups.indptr.tolist() == [0, 1, 4, 5] + [rows] * (rows - 3)
    assert groups.group_lens.tolist() == [0, 8, 0] + [0] * (rows - 3)
    assert (groups.group_table[1, :2].numpy() == inputs.page_table[4, :2]).all()
    own = [n + 1 - length for n, length in zip(prefix, [0, 8, 8, 8, 0], strict=True)]
    assert groups.own_lens.tolist() == own + [1] * (rows - 5)
    for row, (slot, skip) in enumerate(zip(slots, [0, 2, 2, 2, 0], strict=True)):
        count = -(-own[row] // 4)
        assert (groups.own_table[row, :count].numpy() == inputs.page_table[slot, skip : skip + count]).all()


def test_without_groups_every_row_is_in_one_that_shares_nothing(inputs):
    _, _, _, indptr, group_lens, row_lens = decode_arrays(decode_batch([3, 1], [4, 9]), 4)
    assert indptr.tolist() == [0, 4, 4, 4, 4]
    assert not group_lens.any()
    assert not row_lens.any()


def test_of_two_entries_for_one_place_the_last_counts():
    inputs = Inputs(3, 8, 4, torch.device("cpu"))
    updates = PageUpdates(np.array([1, 2, 1], np.int32), np.array([5, 0, 5], np.int32), np.array([[7, 8, 9]], np.int32))
    inputs.note(updates)
    places, pages = inputs.places_of(updates)
    assert list(zip(places.tolist(), pages.tolist(), strict=True)) == [(13, 9), (16, 8), (13, 9)]
