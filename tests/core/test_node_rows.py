"""Test trees of drafts as decode rows (``engine/node_rows.py``) against attention by its definition.

.venv/bin/python -m pytest -q tests/core/test_node_rows.py
"""

import numpy as np
import pytest
import torch

from dovetail.engine.node_rows import NodeRows, node_rows
from dovetail.testing.attention_cases import STEPS
from dovetail.testing.attention_reference import AttentionCase, AttentionStep, reference
from dovetail_attention.config import TorchNativeConfig
from dovetail_attention.torch_native import TorchNativeAttention

CPU = torch.device("cpu")
FORK = [[-1, -1, 0, 0, 1, 2, 5], [-1], [], [-1, 0, 0, 2, 2, -1]]
CASES = {
    "trees": AttentionCase([40, 0, 7, 150], [8, 2, 1, 7], trees=FORK, page_size=1),
    "trees and prompts": AttentionCase(
        [0, 33, 40, 0, 7, 150], [30, 9, 8, 2, 1, 7], num_extend=2, trees=FORK, page_size=1
    ),
    "trees and a window": AttentionCase([40, 0, 7, 150], [8, 2, 1, 7], trees=FORK, page_size=1, window=9),
    "the suite's": AttentionCase(
        STEPS["trees"][0].prefix, STEPS["trees"][0].extend, trees=STEPS["trees"][0].trees, page_size=1
    ),
}


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_every_node_sees_its_ancestors_and_no_other(name):
    step = AttentionStep(CASES[name], CPU)
    assert step.batch.tree_mask is not None
    table, expected = step.batch.page_table.clone(), reference(step)
    rows = NodeRows(TorchNativeAttention(TorchNativeConfig(), step.context()), step.batch)
    out = rows.forward(step.q, step.layer, step.batch).double()
    assert (out - expected).abs().max() < 1e-5
    assert step.batch.page_table.equal(table)


def test_rows_of_nodes_are_those_of_decode_steps():
    step = AttentionStep(CASES["trees and prompts"], CPU)
    found = node_rows(step.batch)
    assert found.num_extend == 2
    assert found.tree_mask is None
    assert found.drafts is None
    assert found.extend_lens.tolist() == [30, 9, *[1] * 18]
    assert np.diff(found.qo_indptr.numpy()).tolist() == found.extend_lens.tolist()
    lens = found.kv_lens.numpy()
    assert lens.tolist() == (found.prefix_lens + found.extend_lens).tolist()
    assert (lens[2:] - 1).tolist() == step.batch.positions[39:].tolist()
    own = step.batch.page_table[2]
    assert found.page_table[2 + 6, :43].tolist() == [*own[:41].tolist(), own[41].item(), own[43].item()]
    assert len(found.slots) == len(found.samples) == 20
    assert found.slots.tolist() == np.repeat(step.batch.slots, [1, 1, 8, 2, 1, 7]).tolist()
