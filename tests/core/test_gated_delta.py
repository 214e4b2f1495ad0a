"""Test the gated delta rule on the CPU against a loop over tokens in float64, and against transformers.

Run: python -m pytest tests/core/test_gated_delta.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from dovetail.interfaces.mixer_shapes import DeltaShape
from dovetail.interfaces.state_rows import StateRows
from dovetail.ops.gated_delta import gated_delta, gated_delta_advance, gated_delta_step
from state_rows_cases import DeltaCase, check_drafts

by_channel = pytest.mark.parametrize("by_channel", [False, True], ids=["by head", "by channel"])


@by_channel
@pytest.mark.parametrize("cuts", [[1000], [1], [5, 64, 2], [65, 1, 1, 40]], ids=str)
def test_however_prompts_are_divided_the_result_is_the_recurrence(cuts: list[int], by_channel: bool) -> None:
    case = DeltaCase(by_channel)
    state = case.before.clone()
    outs = case.rows.run(lambda args, plan: gated_delta(args[0], case.gates(args), state, plan, case.shape), cuts)
    case.check(outs, state, 1e-5)


@by_channel
def test_decode_steps_continue_and_padding_rows_write_nothing(by_channel: bool) -> None:
    case = DeltaCase(by_channel)
    case.before[case.rows.slots[case.rows.fresh]] = 0
    state = case.before.clone()
    outs = case.rows.run_each(lambda args, slots: gated_delta_step(args[0], case.gates(args), state, slots, case.shape))
    case.check(outs, state, 1e-5)


@by_channel
def test_inputs_in_bfloat16_are_rounded_once(by_channel: bool) -> None:
    case = DeltaCase(by_channel, dtype=torch.bfloat16)
    state = case.before.clone()
    outs = case.rows.run(lambda args, plan: gated_delta(args[0], case.gates(args), state, plan, case.shape), [1000])
    case.check(outs, state, 1e-5, 4e-3)


@by_channel
@pytest.mark.parametrize("strength", [-30.0, 30.0])
@pytest.mark.parametrize("decay", [-30.0, 30.0])
def test_extreme_gates_and_equal_keys_stay_exact(by_channel: bool, decay: float, strength: float) -> None:
    """A decay of almost 1 with a strength of almost 1 and equal keys is where products of triangular matrices cancel."""
    case = DeltaCase(by_channel, lens=(130, 64))
    for qkv, a, b in case.rows.args:
        keys = case.shape.key_heads * case.shape.key_dim
        qkv[:, keys : 2 * keys] = qkv[0, keys : 2 * keys]
        a.fill_(decay)
        b.fill_(strength)
    state = case.before.clone()
    outs = case.rows.run(lambda args, plan: gated_delta(args[0], case.gates(args), state, plan, case.shape), [1000])
    case.check(outs, state, 2e-5)


@by_channel
def test_a_long_row_stays_within_the_rounding_of_float32(by_channel: bool) -> None:
    case = DeltaCase(by_channel, lens=(1500,))
    state = case.before.clone()
    outs = case.rows.run(lambda args, plan: gated_delta(args[0], case.gates(args), state, plan, case.shape), [999, 1])
    case.check(outs, state, 2e-4)


@by_channel
def test_padding_rows_begin_with_zeros_and_write_nothing(by_channel: bool) -> None:
    case = DeltaCase(by_channel, lens=(9,))
    state = torch.full_like(case.before, torch.nan)
    lens = np.array([4, 5], np.int32)
    plan = StateRows.of(np.zeros(2, np.int32), lens, np.zeros(2, bool))
    out = gated_delta(case.rows.args[0][0], case.gates(case.rows.args[0]), state, plan, case.shape)
    assert state.isnan().all()
    assert out.isfinite().all()


@by_channel
def test_whole_prompts_and_steps_agree_with_transformers(by_channel: bool) -> None:
    case = DeltaCase(by_channel, lens=(150,))
    (args,), shape = case.rows.args, case.shape
    qkv, a, b = args
    keys = shape.key_heads * shape.key_dim
    q, k = (x.view(1, 150, shape.key_heads, -1) for x in (qkv[:, :keys], qkv[:, keys : 2 * keys]))
    v = qkv[:, 2 * keys :].view(1, 150, shape.value_heads, -1)
    rate = case.rate[:, None] if by_channel else case.rate
    g, beta = (-rate * functional.softplus(a + case.bias))[None], b.sigmoid()[None]
    if by_channel:
        chunked, recurrent = kimi.chunk_kimi_delta_attention, kimi.recurrent_kimi_delta_attention
        q, k = (x.repeat_interleave(shape.value_heads // shape.key_heads, 2) for x in (q, k))
    else:
        chunked, recurrent = qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule
    plan = StateRows.of(np.array([1], np.int32), np.array([150], np.int32), np.array([False]))
    state = case.before.clone()
    out = gated_delta(qkv, case.gates(args), state, plan, shape)
    for function in (chunked, recurrent):
        expected, last = function(
            q, k, v, g=g, beta=beta, initial_state=case.before[1:2], output_final_state=True, use_qk_l2norm_in_kernel=True
        )  # fmt: skip
        torch.testing.assert_close(out, expected[0], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(state[1], last[0], atol=2e-5, rtol=2e-5)


def test_the_width_and_state_of_a_shape() -> None:
    shape = DeltaShape(key_heads=2, value_heads=4, key_dim=8, value_dim=16)
    assert (shape.width, shape.state) == (2 * 2 * 8 + 4 * 16, (4, 8, 16))


@by_channel
def test_states_advance_by_the_accepted_drafts_only(by_channel: bool) -> None:
    check_drafts(DeltaCase(by_channel, lens=(7, 3, 5, 1)), gated_delta, gated_delta_advance)
