"""Test what the engine prepares for models with several cache groups: each group has its own pages.

.venv/bin/python -m pytest -q tests/core/test_engine_groups.py
"""

import numpy as np
import pytest
import torch

from dovetail.engine.grouped import GroupedAttention, backends_of, grouped_attention, grouped_pools, set_views
from dovetail.engine.inputs import Inputs
from dovetail.engine.last import last_rows
from dovetail.engine.sharing import PrefixSharing
from dovetail.engine.verify import compact
from dovetail.engine.verify_inputs import VerifyMemory, VerifyShape, VerifyTensors
from dovetail.interfaces.attention import AttentionBackend
from dovetail.interfaces.cache import CacheGroup
from dovetail.memory.pool import make_pool
from dovetail.memory.table import RequestTable
from dovetail.testing.batches import make_batch
from dovetail.types import DraftTree, ForwardOutput, SharedPrefixes

PAGE, GROUPS, SLOTS, WIDTH = 4, 3, 6, 12


@pytest.fixture
def inputs():
    pages = np.random.default_rng(0).permutation(GROUPS * SLOTS * WIDTH).astype(np.int32) + 1
    inputs = Inputs(pages.reshape(GROUPS, SLOTS, WIDTH), PAGE, torch.device("cpu"))
    inputs.last_token[:] = torch.arange(SLOTS) + 50
    return inputs


def batch_of(inputs, slots, prefix, extend, drafts=None):
    """Return a prepared batch."""
    batch = make_batch(PAGE, np.zeros((len(slots), WIDTH), np.int32), prefix, extend, drafts=drafts)
    batch.slots = np.array(slots, np.int32)
    for req, start, count in zip(batch.reqs, prefix, extend, strict=True):
        assert len(req.token_ids) >= start + count
    inputs.prepare(batch)
    return batch


def check(batch, inputs, slots, prefix, extend):
    """Check the locations of all tokens and the pages of all rows, in every group."""
    tables = [inputs.page_table, *inputs.other_tables]
    for group, table in enumerate(tables):
        view, at = batch.view(group), 0
        for row, (slot, start, count) in enumerate(zip(slots, prefix, extend, strict=True)):
            places = range(start, start + count)
            expected = [int(table[slot, place // PAGE]) * PAGE + place % PAGE for place in places]
            assert view.out_loc[at : at + count].tolist() == expected
            used = -(-(start + count) // PAGE)
            assert view.page_table[row, :used].tolist() == table[slot, :used].tolist()
            at += count
        assert view.kv_lens is batch.kv_lens
        assert view.positions is batch.positions


def test_each_group_has_its_own_pages_and_locations(inputs):
    steps = [
        ([3, 1, 5], [0, 9, 4], [5, 7, 1]),  # prompts beside a decode row
        ([2, 4], [11, 40], [1, 1]),  # a decode step
    ]
    for slots, prefix, extend in steps:
        check(batch_of(inputs, slots, prefix, extend), inputs, slots, prefix, extend)
    drafts = DraftTree.chains(np.array([[7, 8], [9, 0]], np.int32), np.array([2, 1], np.int32))
    slots, prefix, extend = [1, 2], [10, 3], [3, 2]
    check(batch_of(inputs, slots, prefix, extend, drafts), inputs, slots, prefix, extend)


def test_groups_that_do_not_share_read_the_pages_of_each_row(inputs):
    """Two rows share eight tokens in the first group. Layers of the others read each row's own pages."""
    slots, prefix = [3, 1, 5], [9, 30, 2]
    inputs.page_table[1, :2] = inputs.page_table[3, :2]
    batch = make_batch(PAGE, np.zeros((3, WIDTH), np.int32), prefix, [1, 1, 1])
    batch.slots, batch.shared = (
        np.array(slots, np.int32),
        SharedPrefixes(np.array([0, 2, 3], np.int32), np.array([8, 0], np.int32)),
    )
    inputs.prepare(batch)
    groups, table = batch.shared, inputs.page_table
    assert groups is not None
    assert groups.indptr.tolist() == [0, 2, 3, 3]
    assert groups.group_lens.tolist() == [8, 0, 0]
    assert groups.group_table[0, :2].tolist() == table[3, :2].tolist()
    assert groups.own_lens.tolist() == [2, 23, 3]
    assert batch.page_table is groups.own_table
    for row, (slot, first, end) in enumerate([(3, 2, 3), (1, 2, 8), (5, 0, 1)]):
        assert groups.own_table[row, : end - first].tolist() == table[slot, first:end].tolist()
    expected = [int(table[slot, n // PAGE]) * PAGE + n % PAGE for slot, n in zip(slots, prefix, strict=True)]
    assert batch.out_loc.tolist() == expected
    for group, other in enumerate(inputs.other_tables, 1):
        view = batch.view(group)
        assert view.shared is None
        for row, (slot, count) in enumerate([(3, 3), (1, 8), (5, 1)]):
            assert view.page_table[row, :count].tolist() == other[slot, :count].tolist()


def test_a_sliding_group_shares_the_pages_of_the_shortest_row(inputs):
    """Of three rows that share 24 tokens, each has pages for its window of 20 only."""
    slots, prefix, window = [3, 1, 5, 2], [45, 30, 39, 8], 20
    table = inputs.other_tables[1]
    shared_pages = table[3, :6].copy()
    for slot, length in zip(slots[:3], prefix, strict=False):
        table[slot, :6] = shared_pages
        table[slot, : (length + 1 - window) // PAGE] = 0
    batch = make_batch(PAGE, np.zeros((4, WIDTH), np.int32), prefix, [1] * 4)
    batch.slots = np.array(slots, np.int32)
    arrays = np.array([0, 3, 4], np.int32), np.array([24, 0], np.int32), batch.prefix_lens
    batch.shared = PrefixSharing([None, None, window], [0, 2]).at(2, *arrays)
    inputs.prepare(batch)
    assert batch.view(1).shared is None
    assert batch.view(1).page_table[0, :12].tolist() == inputs.other_tables[0][3].tolist()
    view = batch.view(2)
    groups = view.shared
    assert groups is batch.shared.others[1]
    assert groups.first_positions.tolist() == [30, 8, 0, 0]
    assert groups.group_table[0, 2:6].tolist() == shared_pages[2:].tolist(), "those that the row at 30 sees"
    assert groups.own_lens.tolist() == [22, 7, 16, 9]
    assert view.page_table is groups.own_table
    for row, (slot, first, end) in enumerate([(3, 6, 12), (1, 6, 8), (5, 6, 10), (2, 0, 3)]):
        assert groups.own_table[row, : end - first].tolist() == table[slot, first:end].tolist()
    expected = [int(table[slot, n // PAGE]) * PAGE + n % PAGE for slot, n in zip(slots, prefix, strict=True)]
    assert view.out_loc.tolist() == expected


class Planned(AttentionBackend):
    """Keep the batch that was planned."""

    def __init__(self):
        self.batch = None

    def plan(self, batch):
        self.batch = batch

    def forward(self, q, layer, batch):
        return q


def test_the_backend_of_each_group_plans_what_it_sees(inputs):
    members = [Planned() for _ in range(GROUPS)]
    assert grouped_attention(members[:1]) is members[0]
    backend = grouped_attention(members)
    assert isinstance(backend, GroupedAttention)
    assert backends_of(backend) == tuple(members)
    batch = batch_of(inputs, [3, 1], [0, 9], [5, 7])
    backend.plan(batch)
    assert members[0].batch is batch
    assert [m.batch for m in members[1:]] == list(batch.views)
    batch.logit_rows, batch.kv, batch.samples = torch.tensor([11]), (), np.array([False, True])
    last = last_rows(batch, backend)
    for group, member in enumerate(members):
        assert member.batch is last.view(group)
        assert torch.equal(member.batch.page_table, batch.view(group).page_table[1:])
        assert member.batch.out_loc.tolist() == batch.view(group).out_loc[11:].tolist()


def test_the_backend_of_the_first_group_decides_whether_prefixes_are_shared(inputs):
    class Shares(Planned):
        def shares(self, batch):
            assert batch.shared is not None
            return batch.shared.saved > 8

    backend = grouped_attention([Shares(), Planned(), Planned()])
    batch = batch_of(inputs, [3, 1], [9, 30], [1, 1])
    for length, pays in ((8, False), (12, True)):
        batch.shared = SharedPrefixes(np.array([0, 2], np.int32), np.array([length], np.int32))
        assert backend.shares(batch) == pays
    assert not GroupedAttention([]).shares(batch)


def test_updates_reach_the_table_of_each_group():
    table = RequestTable(np.zeros((2, 4, 8), np.int32))
    inputs = Inputs(table.pages, PAGE, torch.device("cpu"))
    table.write(2, 3, np.array([[7, 8], [17, 18]], np.int32))
    places, pages = inputs.entries_of(table.take_updates())
    assert places.tolist() == [19, 20, 51, 52]  # 2 * 8 + 3 in the first group, and 4 * 8 more in the second
    assert pages.tolist() == [7, 8, 17, 18]
    device = torch.zeros(2 * 4 * 8, dtype=torch.int32)
    device[torch.from_numpy(places)] = torch.from_numpy(pages)
    assert torch.equal(device.view(2, 4, 8), inputs.all_pages)


def test_verify_tensors_give_each_group_its_own(inputs):
    shape = VerifyShape(8, 3, False)
    tensors = VerifyTensors(shape, VerifyMemory(shape, WIDTH, inputs.device, GROUPS - 1))
    batch = make_batch(PAGE, np.zeros((2, WIDTH), np.int32), [0, 0], [1, 1])
    tensors.give(batch, 2, 5)
    assert [tuple(view.page_table.shape) for view in batch.views] == [(2, WIDTH)] * (GROUPS - 1)
    memory = {view.out_loc.data_ptr() for view in (batch, *batch.views)}
    assert len(memory) == GROUPS
    assert {len(view.out_loc) for view in batch.views} == {5}


def test_views_share_what_changes_on_the_host(inputs):
    batch = make_batch(PAGE, np.zeros((2, WIDTH), np.int32), [0, 0], [1, 1])
    set_views(batch, [(batch.page_table + 1, batch.out_loc + 1)])
    batch.prefix_lens[:] = 9
    assert batch.view(1).prefix_lens.tolist() == [9, 9]
    assert not batch.view(1).views


def test_accepted_nodes_move_within_the_pages_of_each_group(inputs):
    """Both drafts of the first row follow its last token, and the second one is accepted. The second row is a chain."""
    parents = np.array([[-1, -1], [-1, 0]], np.int32)
    drafts = DraftTree(np.array([[7, 8], [9, 6]], np.int32), parents, np.array([2, 2], np.int32))
    batch = batch_of(inputs, [1, 2], [10, 3], [3, 3], drafts)
    pools = [make_pool(CacheGroup(1, 1, 1), 1 + inputs.all_pages.numel(), PAGE, torch.float32, "cpu") for _ in range(3)]
    for pool in pools:
        pool.k.copy_(torch.arange(pool.k.numel()).view_as(pool.k))
        pool.v.copy_(-pool.k)
    output = ForwardOutput(torch.zeros(2, 3), torch.tensor([2, 3]), torch.tensor([[0, 2, 0], [0, 1, 2]]))
    compact(batch, output, grouped_pools(pools))
    for group, pool in enumerate(pools):
        places = batch.view(group).out_loc
        expected = torch.arange(pool.k.numel(), dtype=torch.float32)
        expected[places[1]] = float(places[2])
        assert torch.equal(pool.k.flatten(), expected)
        assert torch.equal(pool.v.flatten(), -expected)
