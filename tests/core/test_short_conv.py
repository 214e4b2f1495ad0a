"""Test short convolutions with state on the CPU against a loop over tokens in float64.

Run: python -m pytest tests/core/test_short_conv.py
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from dovetail.interfaces.state_rows import StateRows
from dovetail.ops.short_conv import ConvActivation, short_conv, short_conv_advance, short_conv_step
from state_rows_cases import StatefulRows, check_conv, check_conv_drafts, conv_case, conv_reference


def convolved(rows: StatefulRows, weight, bias, before, cuts, activation: ConvActivation):
    state = before.clone()
    return rows.run(lambda args, plan: short_conv(args[0], weight, bias, state, plan, activation), cuts), state


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("cuts", [[1000], [1], [5, 64, 2], [65, 1, 1, 40]], ids=str)
def test_however_prompts_are_divided_the_result_is_the_formula(cuts, dtype, tolerance) -> None:
    for width, with_bias, silu in itertools.product((2, 4), (False, True), (False, True)):
        rows, weight, bias, before = conv_case(width, with_bias, dtype)
        outs, state = convolved(rows, weight, bias, before, cuts, "silu" if silu else "none")
        check_conv(rows, outs, state, weight, bias, before, silu, tolerance)


def test_decode_steps_continue_and_padding_rows_write_nothing() -> None:
    rows, weight, bias, before = conv_case(4, True, torch.float32)
    before[rows.slots[rows.fresh]] = 0
    state = before.clone()
    outs = rows.run_each(lambda args, slots: short_conv_step(args[0], weight, bias, state, slots))
    check_conv(rows, outs, state, weight, bias, before, True, 1e-5)


def test_padding_rows_of_prompts_begin_with_zeros_and_write_nothing() -> None:
    x, weight, state = torch.randn(9, 6), torch.randn(6, 4), torch.full((3, 6, 3), torch.nan)
    plan = StateRows.of(np.zeros(2, np.int32), np.array([4, 5], np.int32), np.zeros(2, bool))
    out = short_conv(x, weight, None, state, plan)
    assert state.isnan().all()
    expected = torch.cat([conv_reference(part, weight, None, torch.zeros(6, 3), True)[0] for part in x.split([4, 5])])
    torch.testing.assert_close(out, expected.float(), atol=1e-5, rtol=1e-5)


def test_a_view_of_a_wider_projection_is_read_in_place() -> None:
    whole, weight, state = torch.randn(5, 20), torch.randn(6, 4), torch.zeros(2, 6, 3)
    plan = StateRows.of(np.array([1], np.int32), np.array([5], np.int32), np.array([True]))
    expected = short_conv(whole[:, 3:9].contiguous(), weight, None, state.clone(), plan)
    assert torch.equal(short_conv(whole[:, 3:9], weight, None, state, plan), expected)


def test_chunks_cover_each_row_in_order() -> None:
    lens = np.array([130, 0, 64, 1], np.int32)
    plan = StateRows.of(np.array([4, 3, 2, 1], np.int32), lens, np.array([True, False, False, True]))
    assert plan.chunk_rows.tolist() == [0, 0, 0, 2, 3]
    assert plan.chunk_starts.tolist() == [0, 64, 128, 130, 194]
    assert plan.first_chunks.tolist() == [0, 3, 3, 4, 5]
    assert plan.indptr.tolist() == [0, 130, 130, 194, 195]
    assert plan.slots.tolist() == [4, 3, 2, 1]
    assert plan.fresh.tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("counts", [[0, 1, 2, 3], [5, 6, 7, 4], [0, 0, 0, 0]])
def test_the_last_inputs_advance_by_the_accepted_drafts_only(counts) -> None:
    check_conv_drafts(short_conv, short_conv_advance, counts)
