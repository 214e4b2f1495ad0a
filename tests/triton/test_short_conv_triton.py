"""Test the kernels of short convolutions, interpreted on the CPU, against a loop over tokens in float64.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_short_conv_triton.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dovetail.interfaces.state_rows import StateRows
from dovetail.ops.triton.short_conv import short_conv, short_conv_advance, short_conv_step
from state_rows_cases import FEW_LENS, check_conv, check_conv_drafts, conv_case, conv_reference


@pytest.mark.parametrize(("width", "bias", "silu"), [(4, False, True), (2, True, False)])
@pytest.mark.parametrize("cuts", [[1000], [5, 64, 2]], ids=str)
def test_however_prompts_are_divided_the_result_is_the_formula(cuts, width, bias, silu) -> None:
    rows, weight, given, before = conv_case(width, bias, torch.float32, FEW_LENS)
    state = before.clone()
    outs = rows.run(
        lambda args, plan: short_conv(args[0], weight, given, state, plan, "silu" if silu else "none"), cuts
    )
    check_conv(rows, outs, state, weight, given, before, silu, 1e-5)


def test_decode_steps_continue_and_padding_rows_write_nothing() -> None:
    rows, weight, bias, before = conv_case(4, True, torch.float32, FEW_LENS)
    before[rows.slots[rows.fresh]] = 0
    state = before.clone()
    outs = rows.run_each(lambda args, slots: short_conv_step(args[0], weight, bias, state, slots))
    check_conv(rows, outs, state, weight, bias, before, True, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("bias", "activation"), [(False, "silu"), (True, "none")])
def test_decode_steps_in_words_of_four_numbers_are_the_formula(dtype, bias, activation) -> None:
    weight, given = torch.randn(40, 4).to(dtype), torch.randn(40).to(dtype) if bias else None
    memory, x = torch.randn(7, 140).to(dtype), torch.randn(5, 64).to(dtype)[:, 4:44]
    state, slots = memory[:, 4:124].unflatten(1, (40, 3)), torch.tensor([3, 0, 6, 1, 0], dtype=torch.int32)
    memory[0], memory[2] = torch.nan, torch.nan
    before = memory.clone()
    old = before[:, 4:124].unflatten(1, (40, 3))[slots].masked_fill((slots == 0).view(-1, 1, 1), 0)
    out = short_conv_step(x, weight, given, state, slots, activation)
    seen = torch.cat((old, x.unsqueeze(2)), 2)
    expected = (seen.double() * weight.double()).sum(2) + (0 if given is None else given.double())
    expected = torch.nn.functional.silu(expected) if activation == "silu" else expected
    torch.testing.assert_close(out.double(), expected, atol=1e-2, rtol=1e-2)
    real = slots != 0
    before[slots[real], 4:124] = seen[real, :, 1:].flatten(1)
    assert memory.nan_to_num(7).equal(before.nan_to_num(7))


def test_padding_rows_of_prompts_begin_with_zeros_and_write_nothing() -> None:
    whole, weight, state = torch.randn(9, 20), torch.randn(6, 4), torch.full((3, 6, 3), torch.nan)
    x = whole[:, 5:11]
    plan = StateRows.of(np.zeros(2, np.int32), np.array([4, 5], np.int32), np.zeros(2, bool))
    out = short_conv(x, weight, None, state, plan)
    assert state.isnan().all()
    expected = torch.cat([conv_reference(part, weight, None, torch.zeros(6, 3), True)[0] for part in x.split([4, 5])])
    torch.testing.assert_close(out, expected.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("counts", [[0, 1, 2, 3], [5, 6, 7, 4]])
def test_the_last_inputs_advance_by_the_accepted_drafts_only(counts) -> None:
    check_conv_drafts(short_conv, short_conv_advance, counts)
