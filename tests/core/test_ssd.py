"""Test the recurrences of Mamba-2 and Mamba on the CPU against a float64 loop over tokens, and against transformers.

Run: python -m pytest tests/core/test_ssd.py
"""

from __future__ import annotations

import pytest
import torch
from transformers.models.jamba.modeling_jamba import mamba_selective_scan
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

from dovetail.ops.selective_scan import selective_scan, selective_scan_advance, selective_scan_step
from dovetail.ops.ssd import ssd, ssd_advance, ssd_step
from recurrences import (
    Recurrence,
    check_division,
    check_drafts,
    check_prompts,
    check_steps,
    close,
    rows_of,
    scan_case,
    ssd_case,
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def cases() -> dict[str, Recurrence]:
    torch.manual_seed(0)
    return {
        "ssd": ssd_case(ssd, ssd_step, heads=6, dim=12, groups=2, width=20),
        "ssd of one group, limited": ssd_case(ssd, ssd_step, 4, 16, 1, 16, limits=(0.05, 0.5)),
        "scan": scan_case(selective_scan, selective_scan_step, channels=37, width=16),
    }


each_case = pytest.mark.parametrize("case", cases().values(), ids=cases())


@each_case
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)], ids=str)
def test_rows_of_different_lengths(case, dtype, tolerance):
    check_prompts(case, 16, dtype, tolerance, lens=[37, 16, 0, 1, 33, 5])


@each_case
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)], ids=str)
def test_steps(case, dtype, tolerance):
    check_steps(case, dtype, tolerance)


@each_case
def test_a_row_divided_at_odd_places_is_the_same(case):
    check_division(case, 16, 150, [1, 2, 19, 36, 100, 149], 2e-4)


@each_case
def test_rows_without_tokens_leave_their_slots(case):
    state = torch.randn(7, *case.shape)
    kept = state.clone()
    out = case.prompt(*case.inputs(0), case.parameters, state, rows_of([1, 2], [0, 0], [True, False], 16))
    assert len(out) == 0
    assert state.equal(kept)


@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.1, 0.7)])
def test_chunk_scan_of_transformers(limits):
    case = ssd_case(ssd, ssd_step, heads=6, dim=12, groups=2, width=20, limits=limits)
    x, dt, b, c = case.inputs(45)
    own, state = case.parameters, torch.randn(2, *case.shape)
    expected, last = mamba2_chunk_scan(
        x[None], dt[None], own.a, b[None], c[None], 16, D=own.d, dt_bias=own.dt_bias, initial_states=state[1:],
        dt_softplus=True, dt_limit=limits, return_final_states=True,
    )  # fmt: skip
    close(ssd(x, dt, b, c, own, state, rows_of([1], [45], [False], 32)), expected[0], 1e-5)
    close(state[1], last[0], 1e-5)


def test_selective_scan_of_transformers():
    case = scan_case(selective_scan, selective_scan_step, channels=37, width=16)
    x, dt, b, c = case.inputs(45)
    own, state = case.parameters, torch.zeros(2, *case.shape)
    expected, last = mamba_selective_scan(
        x.T[None], dt.T[None], own.a, b.T[None], c.T[None], D=own.d, delta_bias=own.dt_bias, delta_softplus=True,
        return_last_state=True,
    )  # fmt: skip
    close(selective_scan(x, dt, b, c, own, state, rows_of([1], [45], [True], 16)), expected[0].T, 1e-5)
    close(state[1], last[0], 1e-5)


@each_case
@pytest.mark.parametrize("counts", [[0, 0, 0, 0], [1, 1, 2, 3], [5, 4, 7, 3]], ids=str)
def test_states_advance_by_the_accepted_drafts_only(case, counts):
    check_drafts(case, ssd_advance if case.prompt is ssd else selective_scan_advance, [5, 4, 7, 3], counts, 1e-5)
