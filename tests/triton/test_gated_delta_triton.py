"""Test the kernels of the gated delta rule, interpreted on the CPU, against a loop over tokens in float64.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_gated_delta_triton.py
"""

from __future__ import annotations

import pytest
import torch

from dovetail.interfaces.mixer_shapes import DeltaShape
from dovetail.ops.triton import delta_steps
from dovetail.ops.triton.delta_steps import StepTiles
from dovetail.ops.triton.gated_delta import gated_delta, gated_delta_advance, gated_delta_step
from state_rows_cases import DeltaCase, check_drafts

SHAPE = DeltaShape(key_heads=1, value_heads=2, key_dim=8, value_dim=20)
by_channel = pytest.mark.parametrize("by_channel", [False, True], ids=["by head", "by channel"])


@by_channel
@pytest.mark.parametrize("cuts", [[1000], [5, 64, 2]], ids=str)
def test_however_prompts_are_divided_the_result_is_the_recurrence(cuts: list[int], by_channel: bool) -> None:
    case = DeltaCase(by_channel, (66, 1, 0, 3), shape=SHAPE)
    state = case.before.clone()
    outs = case.rows.run(lambda args, plan: gated_delta(args[0], case.gates(args), state, plan, case.shape), cuts)
    case.check(outs, state, 1e-5)


@by_channel
def test_decode_steps_continue_and_padding_rows_write_nothing(by_channel: bool) -> None:
    case = DeltaCase(by_channel, (7, 3, 1), shape=SHAPE)
    case.before[case.rows.slots[case.rows.fresh]] = 0
    state = case.before.clone()
    state[0] = torch.nan
    outs = case.rows.run_each(lambda args, slots: gated_delta_step(args[0], case.gates(args), state, slots, case.shape))
    assert state[0].isnan().all()
    state[0] = case.before[0]
    case.check(outs, state, 1e-5)


@pytest.mark.parametrize("shape", [DeltaShape(1, 2, 24, 72), DeltaShape(2, 2, 16, 100)])
def test_programs_of_several_tiles_are_those_of_one(shape: DeltaShape, monkeypatch: pytest.MonkeyPatch) -> None:
    case = DeltaCase(False, (2,) * 5, shape=shape)
    found = []
    for tiles in (StepTiles(32, 1, 4), StepTiles(16, 8, 4), StepTiles(32, 4, 4)):
        state = case.before.clone()
        state[0] = torch.nan
        monkeypatch.setattr(delta_steps, "step_tiles", lambda *_, tiles=tiles: tiles)
        outs = case.rows.run_each(
            lambda args, slots, state=state: gated_delta_step(args[0], case.gates(args), state, slots, shape)
        )
        assert state[0].isnan().all()
        found.append((torch.cat([each.flatten() for each in outs]), state[1:]))
    for outs, states in found[1:]:
        torch.testing.assert_close(outs, found[0][0], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(states, found[0][1], atol=1e-6, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize("shape", [DeltaShape(1, 2, 32, 64), DeltaShape(2, 2, 48, 128)])
def test_products_with_states_of_16_bits_are_the_recurrence(shape: DeltaShape) -> None:
    """Numbers in float16 stand for those in bfloat16, which the interpreter does not multiply."""
    case = DeltaCase(False, (4, 3, 1), torch.float16, shape)
    case.before = case.before.half().float()
    case.before[case.rows.slots[case.rows.fresh]] = 0
    state = case.before.half()
    state[0] = torch.nan

    def step(args: list[torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
        qkv, gates = args[0].half(), case.gates([arg.half() for arg in args])
        assert delta_steps.multiplies(qkv, gates, state, shape)
        return delta_steps.step(qkv, gates, state, slots, shape)

    outs = case.rows.run_each(step)
    assert state[0].isnan().all()
    state[0] = case.before[0]
    case.check(outs, state.float(), 6e-3)


@by_channel
@pytest.mark.parametrize("decay", [-30.0, 30.0])
def test_extreme_gates_and_equal_keys_stay_exact(by_channel: bool, decay: float) -> None:
    """A decay of almost 1 with a strength of almost 1 and equal keys is where products of triangular matrices cancel."""
    case = DeltaCase(by_channel, (64,), shape=SHAPE)
    for qkv, a, b in case.rows.args:
        qkv[:, 8:16] = qkv[0, 8:16]
        a.fill_(decay)
        b.fill_(30.0)
    state = case.before.clone()
    outs = case.rows.run(lambda args, plan: gated_delta(args[0], case.gates(args), state, plan, case.shape), [1000])
    case.check(outs, state, 2e-5)


def test_inputs_in_float16_are_views_of_wider_tensors() -> None:
    case = DeltaCase(False, (70,), torch.float16, SHAPE)
    args = case.rows.args[0]
    case.rows.args[0][0] = torch.cat((torch.full((70, 3), torch.nan), args[0]), 1).to(torch.float16)[:, 3:]
    state = case.before.clone()

    def run(args, plan):
        qkv = torch.cat((torch.full((len(args[0]), 3), torch.nan, dtype=torch.float16), args[0]), 1)[:, 3:]
        return gated_delta(qkv, case.gates(args), state, plan, case.shape)

    case.check(case.rows.run(run, [40]), state, 4e-3, 4e-3)


@by_channel
def test_states_advance_by_the_accepted_drafts_only(by_channel: bool) -> None:
    check_drafts(DeltaCase(by_channel, (7, 3, 5, 1), shape=SHAPE), gated_delta, gated_delta_advance)
