"""Test what the host sends for a verify step: real rows first, and page 0 in all padding.

.venv/bin/python -m pytest -q tests/core/test_verify_inputs.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dovetail.engine.inputs import Inputs, tree_mask
from dovetail.engine.verify_graphs import VerifySizes, VerifyStep
from dovetail.engine.verify_inputs import (
    VerifyMemory,
    VerifyShape,
    VerifyTensors,
    empty_batch,
    set_lens,
    static_batch,
    write_pages,
)
from dovetail.memory.table import RequestTable
from dovetail.testing.batches import make_batch, make_page_table, make_tree_mask
from dovetail.types import DraftTree

PAGE = 4


def make_inputs(slots, max_pages):
    """Return the host's table, and the inputs that read it."""
    table = RequestTable(np.zeros((1, slots + 1, max_pages), np.int32))
    return table, Inputs(table.pages, PAGE, torch.device("cpu"))


def random_batch(seed, prompts=0):
    """Return verify rows behind ``prompts`` prompts, and the pages of all."""
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


@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("seed", range(20))
def test_the_host_sends_slots_lengths_and_drafts(seed, tree):
    batch, table = random_batch(seed)
    rows, total, width = len(batch.slots), batch.num_tokens, int(batch.extend_lens.max())
    shape = VerifyShape(total + seed % 7, width + 2, tree)
    memory = VerifyMemory(shape, table.shape[1], torch.device("cpu"))
    memory.sent.fill_(-7)  # of the step before
    numbers = np.random.default_rng(seed).random(total)
    VerifyTensors(shape, memory).write(batch, make_inputs(9, table.shape[1])[1], numbers)
    sent, count, slots, prefix_lens, counts, drafts, parents = shape.parts(memory.sent.numpy()[: shape.size])

    assert np.array_equal(sent.view(np.float64)[:total], numbers)
    assert count.tolist() == [rows]
    for array, expected in ((slots, batch.slots), (prefix_lens, batch.prefix_lens), (counts, batch.extend_lens)):
        assert np.array_equal(array[:rows], expected)
    for row in range(rows):
        k = batch.drafts.lens[row]
        assert np.array_equal(drafts[row, :k], batch.drafts.token_ids[row, :k])
        if tree:
            assert np.array_equal(parents[row, :k], batch.drafts.parents[row, :k])
    assert memory.sent[shape.size] == 0, "no new pages"


@pytest.mark.parametrize("numbered", [False, True])
def test_rows_that_stay_are_sent_again_where_another_size_or_others_have_been_in_their_place(numbered):
    (batch, table), (other, _) = random_batch(3), random_batch(4)
    if numbered:
        batch.rows_version, other.rows_version = 7, 8
    _, inputs = make_inputs(9, 60)
    shapes = [VerifyShape(tokens, 12, False) for tokens in (40, 48)]
    memory = VerifyMemory(shapes[1], table.shape[1], torch.device("cpu"))
    steps = [VerifyTensors(shape, memory) for shape in shapes]
    for step, sent in [
        (0, batch),
        (0, batch),
        (1, batch),
        (0, batch),
        (0, other),
        (0, batch),
        (1, other),
        (1, empty_batch()),
        (1, other),
    ]:
        steps[step].write(sent, inputs)
        _, count, slots, prefix_lens, *_ = shapes[step].parts(memory.sent.numpy()[: shapes[step].size])
        rows = len(sent.slots)
        assert count.tolist() == [rows]
        assert np.array_equal(slots[:rows], sent.slots)
        assert np.array_equal(prefix_lens[:rows], sent.prefix_lens)


def test_lengths_of_a_planned_batch_follow_the_step():
    batch, _ = random_batch(3)
    tokens, width = batch.num_tokens + 2, int(batch.extend_lens.max())
    static = static_batch(VerifyShape(tokens, width, True), 100)
    assert (static.extend_lens == width).all()
    assert (static.prefix_lens + static.extend_lens == 100).all()
    assert static.drafts.is_chain
    set_lens(static, batch, batch.num_tokens)
    rows = len(batch.slots)
    assert np.array_equal(static.prefix_lens[:rows], batch.prefix_lens)
    assert not static.prefix_lens[rows:].any()
    assert static.extend_lens.sum() == tokens
    assert np.array_equal(static.extend_lens[:rows], batch.extend_lens)


def written(table, slots, columns, pages):
    """Return the updates of entries that are written one after another."""
    for slot, column, page in zip(slots, columns, pages, strict=True):
        table.write(slot, column, np.array([[page]], np.int32))
    return table.take_updates()


def test_new_pages_travel_behind_a_block_while_its_capacity_lasts():
    (table, inputs), shape, sent = make_inputs(3, 50), VerifyShape(2, 3, False), []
    inputs.upload = lambda *arrays, updates: sent.append(updates)
    behind = np.full(1 + 2 * shape.page_capacity, -7, np.int32)
    new = written(table, [2, 3, 2], [4, 0, 4], [9, 8, 7])
    write_pages(inputs, new, shape, behind)
    assert behind[0] == 3
    assert behind[1:4].tolist() == [104, 150, 104]
    assert behind[1 + shape.page_capacity :][:3].tolist() == [7, 8, 7], "the page that was written later counts"

    many = written(
        table, [1] * (shape.page_capacity + 1), range(shape.page_capacity + 1), range(1, shape.page_capacity + 2)
    )
    write_pages(inputs, many, shape, behind)
    assert behind[0] == 0
    assert sent == [many]


@pytest.mark.parametrize(("tokens", "width"), [(512, 9), (9, 9), (4, 9), (1, 65), (7, 7), (40, 17)])
def test_no_step_is_captured_that_its_memory_cannot_hold(tokens, width):
    counts = VerifySizes(tokens, width, trees=False, context_len=100).counts
    assert counts == sorted(set(counts))
    assert counts[-1] == tokens
    assert width in counts or width > tokens


def test_the_result_of_a_step_is_what_its_graph_has_written_last():
    """The views of the result are kept from step to step, for each number of rows."""
    _, inputs = make_inputs(4, 8)
    shape = VerifyShape(4, 3, tree=False)
    step = VerifyStep(shape, inputs, VerifyMemory(shape, 8, torch.device("cpu")), 32)
    own = step.tensors
    for rows in (2, 3, 2, 4, 3):
        written = torch.randint(0, 90, own.result.shape)
        for result in (own.result, own.result_on_host):
            result.copy_(written)
        output, width = step.output(rows), written.shape[1] // 2
        assert output.on_host is not None
        assert output.result is not None
        for tokens, lens in (
            (output.token_ids, output.accept_lens),
            (output.on_host.token_ids, output.on_host.accept_lens),
            (output.result.token_ids, output.result.accept_lens),
        ):
            np.testing.assert_array_equal(tokens, written[:rows, :width])
            np.testing.assert_array_equal(lens, written[:rows, -1])
        np.testing.assert_array_equal(output.nodes, written[:rows, width:-1])
        output.event = object()  # an output is that of one step
        assert step.output(rows).event is None
