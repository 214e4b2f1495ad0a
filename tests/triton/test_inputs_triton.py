"""Test the inputs of decode and verify steps, computed on the device from slots and lengths.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_inputs_triton.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dovetail.engine.inputs import DecodeTensors, Inputs, decode_arrays, pack, unpack
from dovetail.engine.sharing import PrefixSharing
from dovetail.engine.verify_inputs import VerifyMemory, VerifyShape, VerifyTensors
from dovetail.memory.table import RequestTable
from dovetail.ops.triton.inputs import fetch, verify_inputs
from dovetail.types import Batch, DraftTree, PageUpdates, SharedPrefixes

NOTHING = np.zeros(0, np.int32)
NO_UPDATES = PageUpdates(NOTHING, NOTHING, np.zeros((1, 0), np.int32))


def decode_batch(slots, prefix_lens, shared=None):
    rows = len(slots)
    ones = np.ones(rows, np.int32)
    batch = Batch([], 0, np.array(slots, np.int32), np.array(prefix_lens, np.int32), ones, ones > 0, NO_UPDATES)
    batch.shared = shared
    return batch


def run(inputs, batch, rows):
    tensors = DecodeTensors(rows, inputs.pages.shape[1], inputs.device, [batch.shared is not None])
    arrays = decode_arrays(batch, rows)
    tensors.read(unpack(torch.from_numpy(pack(arrays)), arrays))
    tensors.compute(inputs, batch.shared)
    tensors.give(batch)
    return batch


@pytest.fixture
def inputs():
    inputs = Inputs(np.zeros((1, 7, 400), np.int32), 4, torch.device("cpu"))
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


def updates_of(table, entries):
    for slot, column, page in entries:
        table.write(slot, column, np.array([[page]], np.int32))
    return table.take_updates()


def test_of_two_entries_for_one_place_the_last_counts():
    table = RequestTable(np.zeros((1, 4, 8), np.int32))
    inputs = Inputs(table.pages, 4, torch.device("cpu"))
    updates = updates_of(table, [(1, 5, 7), (2, 0, 8), (1, 5, 9)])
    places, pages = inputs.entries_of(updates)
    assert list(zip(places.tolist(), pages.tolist(), strict=True)) == [(13, 9), (16, 8), (13, 9)]


def test_updates_are_located_again_where_that_was_interrupted():
    table = RequestTable(np.zeros((1, 4, 8), np.int32))
    inputs = Inputs(table.pages, 4, torch.device("cpu"))
    updates = updates_of(table, [(1, 5, 7), (2, 0, 8)])
    flat, inputs._flat_table = inputs._flat_table, Interrupted()
    with pytest.raises(KeyboardInterrupt):
        inputs.locate_updates(updates)
    inputs._flat_table = flat
    places, pages = inputs.entries_of(updates)
    assert list(zip(places.tolist(), pages.tolist(), strict=True)) == [(13, 7), (16, 8)]
    assert (inputs.page_table[1, 5], inputs.page_table[2, 0]) == (7, 8)


def test_updates_that_were_located_ahead_are_those_of_the_table_at_the_step():
    table = RequestTable(np.zeros((1, 4, 8), np.int32))
    inputs = Inputs(table.pages, 4, torch.device("cpu"))
    table.write(1, 5, np.array([[7]], np.int32))
    inputs.locate_updates(table.next_updates())
    assert [a.tolist() for a in inputs.entries_of(table.next_updates())] == [[13], [7]]
    table.write(1, 5, np.array([[9]], np.int32))
    table.write(2, 0, np.array([[8]], np.int32))
    updates = table.take_updates()
    assert [a.tolist() for a in inputs.entries_of(updates)] == [[13, 13, 16], [9, 9, 8]]
    table.put_back(updates)
    table.write(2, 1, np.array([[6]], np.int32))
    assert [a.tolist() for a in inputs.entries_of(table.take_updates())] == [[13, 13, 16, 17], [9, 9, 8, 6]]
    assert not inputs.entries_of(table.take_updates())


class Interrupted:
    """Stand in for an array whose user presses Ctrl-C."""

    def __getitem__(self, places):
        raise KeyboardInterrupt


@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("seed", range(4))
def test_verify_inputs_fill_a_step_up_with_rows_of_slot_0(seed: int, tree: bool) -> None:
    rng, page = np.random.default_rng(seed), 4
    rows, k = int(rng.integers(0, 4)), 3
    counts = rng.integers(1, k + 2, rows)
    tokens = int(counts.sum()) + seed + 1
    slots = rng.permutation(np.arange(1, 8))[:rows]
    prefix, drafts = rng.integers(0, 12, rows), rng.integers(0, 90, (rows, k))
    parents = np.stack(
        [[rng.integers(-1, j) if tree and j else j - 1 for j in range(k)] for _ in range(rows)] or [[0] * k]
    )
    stale = [torch.full((tokens,), -7, dtype=torch.int32) for _ in range(3)]
    for tensor, own in zip(stale, (slots, prefix, counts), strict=True):
        tensor[:rows] = torch.from_numpy(own)
    wide = torch.full((2, tokens, k), -7, dtype=torch.int32)
    wide[0, :rows], wide[1, :rows] = torch.from_numpy(drafts), torch.from_numpy(parents[:rows])
    table = torch.from_numpy(rng.integers(1, 99, (8, 6)).astype(np.int32))
    table[0] = 0
    last_token = torch.from_numpy(rng.integers(0, 90, 8))
    ids, positions, out_loc, row_of = torch.full((4, tokens), -7)
    indptr, own_slots, kv_lens = (torch.full((n,), -7, dtype=torch.int32) for n in (tokens + 1, tokens, tokens))
    copied = torch.full((tokens, 6), -7, dtype=torch.int32)
    mask = torch.full((tokens, k + 1), 7, dtype=torch.uint8) if tree else None
    sent = torch.tensor([rows], dtype=torch.int32), *stale, wide[0], wide[1] if tree else None
    of_rows = indptr, own_slots, kv_lens, copied
    verify_inputs(sent, last_token, table, page, (ids, positions, out_loc, row_of), of_rows, mask)

    starts = np.append(0, np.cumsum(counts)).astype(int)
    fill = np.arange(starts[-1] + 1, tokens + 1)
    assert indptr.tolist() == [*starts, *fill, *[tokens] * (tokens - rows - len(fill))]
    assert own_slots.tolist() == [*slots, *[0] * (tokens - rows)]
    assert kv_lens.tolist() == [*(prefix + counts), *[1] * (tokens - rows)]
    for row in range(rows):
        depth = [0]
        for node in range(counts[row]):
            at = starts[row] + node
            place = prefix[row] + node
            depth += [depth[parents[row, node - 1] + 1] + 1] if node else []
            path = {node}
            while max(path) and min(path):
                path.add(int(parents[row, min(path) - 1]) + 1)
            assert ids[at] == (drafts[row, node - 1] if node else last_token[slots[row]])
            assert positions[at] == prefix[row] + depth[node]
            assert out_loc[at] == table[slots[row], place // page] * page + place % page
            assert row_of[at] == row
            if mask is not None:
                assert mask[at].nonzero()[:, 0].tolist() == sorted(path)
        pages = -(-int(prefix[row] + counts[row]) // page)
        assert torch.equal(copied[row, :pages], table[slots[row], :pages])
    for at in range(starts[-1], tokens):
        assert (positions[at], out_loc[at], ids[at]) == (0, 0, last_token[0])
        assert mask is None or mask[at].tolist() == [1] + [0] * k


def test_what_the_host_has_written_is_fetched_with_new_pages() -> None:
    size, capacity = 300, 20
    source = torch.arange(1, size + 2 + 2 * capacity, dtype=torch.int32)
    source[size] = 2
    source[size + 1 : size + 3] = torch.tensor([7, 11])
    source[size + 1 + capacity : size + 3 + capacity] = torch.tensor([90, 91])
    target, table = torch.zeros(size, dtype=torch.int32), torch.zeros(3, 5, dtype=torch.int32)
    fetch(source, target, capacity, table)
    assert torch.equal(target, source[:size])
    assert table.flatten().tolist() == [0] * 7 + [90, 0, 0, 0, 91, 0, 0, 0]


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
def test_each_group_has_its_own_pages_and_locations(shared):
    """Only the first group has tables of shared and of own pages."""
    pages = np.random.default_rng(0).permutation(2 * 7 * 40).astype(np.int32).reshape(2, 7, 40) + 1
    pages[:, 0] = 0
    inputs = Inputs(pages, 4, torch.device("cpu"))
    inputs.last_token[:] = torch.arange(7) + 100
    pages[0, 6, :2] = pages[0, 1, :2]
    groups = SharedPrefixes(np.array([0, 1, 3], np.int32), np.array([0, 8], np.int32)) if shared else None
    prefix = [0, 9 if shared else 3, 159]
    batch = decode_batch([3, 1, 6], prefix, groups)
    tensors = DecodeTensors(5, 40, inputs.device, [shared, False])
    arrays = decode_arrays(batch, 5)
    tensors.read(unpack(torch.from_numpy(pack(arrays)), arrays))
    tensors.compute(inputs, groups)
    tensors.narrow(3).give(batch)
    for group in range(int(shared), 2):
        check_group(batch.view(group), pages[group], [3, 1, 6], prefix)
    assert batch.view(1).shared is None
    if groups is not None:
        assert groups.group_table[1, :2].tolist() == pages[0, 1, :2].tolist()
        assert groups.own_lens.tolist() == [1, 2, 152]
        assert groups.own_table[1, 0] == pages[0, 1, 2]
        assert groups.own_table[2, :38].tolist() == pages[0, 6, 2:].tolist()
    assert batch.view(1).kv_lens is batch.kv_lens


@pytest.mark.parametrize("many", [False, True], ids=["few rows", "many rows"])
def test_a_sliding_group_shares_the_pages_of_the_shortest_row(many):
    """The shortest row stands anywhere in its group, also behind more rows than a block of the kernel has."""
    sizes = [3, 1, 300] if many else [2, 1, 4]
    rows, window = sum(sizes), 12
    rng = np.random.default_rng(many)
    pages = rng.permutation(3 * (rows + 1) * 12).astype(np.int32).reshape(3, rows + 1, 12) + 1
    pages[:, 0] = 0
    inputs = Inputs(pages, 4, torch.device("cpu"))
    starts, lens = np.cumsum([0, *sizes]).astype(np.int32), np.array([16, 0, 20], np.int32)
    prefix = rng.integers(24, 45, rows)
    for at in (1, sum(sizes) - 2):
        prefix[at] = 21
    slots = rng.permutation(rows) + 1
    before = pages.copy()
    for row in range(rows):
        pages[2, slots[row], : (prefix[row] + 1 - window) // 4] = 0
    batch = decode_batch(slots, prefix)
    batch.shared = PrefixSharing([None, 9, window], [0, 2]).at(2, starts, lens, batch.prefix_lens)
    tensors = DecodeTensors(rows + 2, 12, inputs.device, [True, False, True])
    arrays = decode_arrays(batch, rows + 2)
    tensors.read(unpack(torch.from_numpy(pack(arrays)), arrays))
    tensors.compute(inputs, batch.shared)
    tensors.narrow(rows).give(batch)
    view, row_lens = batch.view(2), np.repeat(lens, sizes)
    groups = view.shared
    assert groups is batch.shared.others[1]
    assert batch.view(1).shared is None
    for group, shortest in ((0, 1), (2, rows - 2)):
        assert groups.first_positions[group] == 21
        seen = slice((21 + 1 - window) // 4, lens[group] // 4)
        assert groups.group_table[group, seen].tolist() == before[2, slots[shortest], seen].tolist()
        first = slots[starts[group]]
        assert (
            batch.shared.group_table[group, : lens[group] // 4].tolist() == pages[0, first, : lens[group] // 4].tolist()
        )
    assert groups.own_lens[:rows].tolist() == (prefix + 1 - row_lens).tolist()
    for row, slot in enumerate(slots):
        own = pages[2, slot, row_lens[row] // 4 : prefix[row] // 4 + 1].tolist()
        assert view.page_table[row, : len(own)].tolist() == groups.own_table[row, : len(own)].tolist() == own


@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
def test_each_group_of_a_verify_step_has_its_own_pages_and_locations(tree):
    table = RequestTable(np.zeros((2, 7, 40), np.int32))
    inputs = Inputs(table.pages, 4, torch.device("cpu"))
    inputs.all_pages = inputs.all_pages.clone()  # as on another device: the step brings the pages
    inputs.pages, *inputs.other_pages = inputs.all_pages.unbind(0)
    for slot in range(1, 7):
        table.write(slot, 0, np.random.default_rng(slot).integers(1, 999, (2, 40)).astype(np.int32))
    first = table.take_updates()
    parents = np.array([[-1, -1], [-1, 0]], np.int32) if tree else None
    ids, lens = np.array([[7, 8], [9, 0]], np.int32), np.array([2, 1], np.int32)
    batch = decode_batch([2, 5], [6, 31])
    batch.drafts = DraftTree(ids, parents, lens) if parents is not None else DraftTree.chains(ids, lens)
    batch.extend_lens, batch.page_updates = 1 + lens, first
    shape = VerifyShape(6, 3, tree)
    tensors = VerifyTensors(shape, VerifyMemory(shape, 40, inputs.device, 1))
    inputs.all_pages.view(-1)[torch.from_numpy(inputs.entries_of(first)[0])] = torch.from_numpy(
        inputs.entries_of(first)[1]
    )
    table.write(5, 8, np.array([[1001], [1002]], np.int32))
    batch.page_updates = table.take_updates()
    tensors.write(batch, inputs)
    tensors.compute(inputs)
    tensors.give(batch, 2, 5)
    for group in range(2):
        check_group(batch.view(group), table.pages[group], [2, 5], [6, 31], [3, 2])
    assert batch.view(1).page_table[1, 8] == 1002


def check_group(batch, table, slots, prefix, counts=None):
    at = 0
    for row, (slot, start) in enumerate(zip(slots, prefix, strict=True)):
        end = start + (1 if counts is None else counts[row])
        expected = [int(table[slot, n // 4]) * 4 + n % 4 for n in range(start, end)]
        assert batch.out_loc[at : at + len(expected)].tolist() == expected
        used = -(-end // 4)
        assert (batch.page_table[row, :used].numpy() == table[slot, :used]).all()
        at += len(expected)
