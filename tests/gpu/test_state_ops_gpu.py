"""Test the operations that keep states on CUDA, through their public functions, against loops over tokens in float64.

Run on a GPU machine: python -m pytest tests/gpu/test_state_ops_gpu.py
"""

from __future__ import annotations

import pytest
import torch

from dovetail.ops.short_conv import short_conv, short_conv_step
from state_rows_cases import check_conv, conv_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES.items(), ids=str)
@pytest.mark.parametrize("cuts", [[1000], [1], [5, 64, 2]], ids=str)
def test_however_prompts_are_divided_a_convolution_is_the_formula(cuts, dtype, tolerance) -> None:
    rows, weight, bias, before = conv_case(4, True, dtype)
    assert bias is not None
    state, on_device = before.cuda(), (weight.cuda(), bias.cuda())
    outs = rows.run(lambda args, plan: short_conv(args[0], *on_device, state, plan), cuts, "cuda")
    check_conv(rows, outs, state.cpu(), weight, bias, before, True, tolerance)


def test_decode_steps_of_a_convolution_continue_and_padding_rows_write_nothing() -> None:
    rows, weight, bias, before = conv_case(4, True, torch.float32)
    before[rows.slots[rows.fresh]] = 0
    assert bias is not None
    state, on_device = before.cuda(), (weight.cuda(), bias.cuda())
    outs = rows.run_each(lambda args, slots: short_conv_step(args[0], *on_device, state, slots), "cuda")
    check_conv(rows, outs, state.cpu(), weight, bias, before, True, 1e-5)
