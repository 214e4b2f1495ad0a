"""Test the operations that keep states on CUDA, against loops over tokens in float64.

Run on a GPU machine: python -m pytest tests/gpu/test_state_ops_gpu.py
"""

from __future__ import annotations

import pytest
import torch

from dovetail.interfaces.mixer_shapes import DeltaShape
from dovetail.ops.triton import delta_steps
from dovetail.ops.triton.gated_delta import gated_delta, gated_delta_advance, gated_delta_step
from dovetail.ops.triton.short_conv import short_conv, short_conv_advance, short_conv_step
from state_rows_cases import DeltaCase, check_conv, check_conv_drafts, check_drafts, conv_case

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


SHAPES = (DeltaShape(2, 4, 128, 128), DeltaShape(3, 3, 64, 40))
SMALL = (DeltaShape(2, 4, 16, 20), DeltaShape(1, 2, 32, 32), DeltaShape(2, 2, 48, 16))
DELTA_DTYPES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
by_channel = pytest.mark.parametrize("by_channel", [False, True], ids=["by head", "by channel"])


@by_channel
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, dtype) for shape in SHAPES[:1] + SMALL[:1] for dtype in DELTA_DTYPES),
        (SHAPES[1], torch.float32),
        (SHAPES[1], torch.bfloat16),
        (SMALL[1], torch.bfloat16),
        (SMALL[2], torch.float16),
        (SMALL[2], torch.bfloat16),
    ],
    ids=str,
)
def test_however_prompts_are_divided_the_gated_delta_rule_is_the_recurrence(shape, dtype, by_channel):
    tolerance = DELTA_DTYPES[dtype]
    for cuts in ([1000], [5, 64, 2]):
        case = DeltaCase(by_channel, dtype=dtype, shape=shape)
        state = case.before.cuda()
        outs = case.rows.run(prompts_on(case, state), cuts, "cuda")
        case.check(outs, state.cpu(), tolerance, tolerance)


def prompts_on(case, state):
    return lambda args, plan: gated_delta(args[0], case.gates(args), state, plan, case.shape)


@by_channel
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_steps_of_the_gated_delta_rule_continue(shape, by_channel) -> None:
    case = DeltaCase(by_channel, (70, 1, 0, 3), shape=shape)
    case.before[case.rows.slots[case.rows.fresh]] = 0
    state = case.before.cuda()

    def step(args, slots):
        return gated_delta_step(args[0], case.gates(args), state, slots, case.shape)

    case.check(case.rows.run_each(step, "cuda"), state.cpu(), 1e-4)


@pytest.mark.parametrize("shape", [DeltaShape(2, 4, 128, 128), DeltaShape(2, 2, 48, 64)], ids=str)
def test_decode_rows_with_states_in_bfloat16_are_the_recurrence(shape) -> None:
    case = DeltaCase(False, (4, 3, 1, 4), torch.bfloat16, shape)
    case.before = case.before.bfloat16().float()
    case.before[case.rows.slots[case.rows.fresh]] = 0
    state = case.before.bfloat16().cuda()
    state[0] = torch.nan

    def step(args, slots):
        args = [arg.bfloat16() for arg in args]
        assert delta_steps.multiplies(args[0], case.gates(args), state, shape)
        return gated_delta_step(args[0], case.gates(args), state, slots, shape)

    outs = case.rows.run_each(step, "cuda")
    assert state[0].isnan().all()
    state[0] = case.before[0].bfloat16()
    case.check(outs, state.float().cpu(), 5e-2)


@by_channel
@pytest.mark.parametrize("decay", [-30.0, 30.0])
def test_extreme_gates_and_equal_keys_stay_exact(by_channel, decay) -> None:
    case = DeltaCase(by_channel, (130, 64), shape=SHAPES[0])
    for qkv, a, b in case.rows.args:
        qkv[:, 256:512] = qkv[0, 256:512]
        a.fill_(decay)
        b.fill_(30.0)
    state = case.before.cuda()
    outs = case.rows.run(prompts_on(case, state), [1000], "cuda")
    case.check(outs, state.cpu(), 1e-3)


@pytest.mark.parametrize("counts", [[0, 1, 2, 3], [5, 6, 7, 4]])
def test_the_last_inputs_advance_by_the_accepted_drafts_only(counts) -> None:
    check_conv_drafts(short_conv, short_conv_advance, counts, "cuda")


@by_channel
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_states_advance_by_the_accepted_drafts_only(shape, by_channel) -> None:
    check_drafts(DeltaCase(by_channel, (7, 3, 5, 1), shape=shape), gated_delta, gated_delta_advance, "cuda", 1e-4)
