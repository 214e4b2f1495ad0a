"""Test the kernels of the mixers of Mamba-2 and Mamba, interpreted, against float64: recurrences, a loop over tokens, and gated norms.

Half precision stands for both, because the interpreter does not multiply bfloat16.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_ssd_triton.py
"""

from __future__ import annotations

import pytest
import torch

from dovetail.ops.triton.gated_norm import gated_rms_norm
from dovetail.ops.triton.selective_scan import selective_scan, selective_scan_advance, selective_scan_step
from dovetail.ops.triton.ssd import ssd, ssd_advance, ssd_step
from recurrences import (
    Recurrence,
    check_division,
    check_drafts,
    check_gated_norm,
    check_prompts,
    check_steps,
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
        "ssd": ssd_case(ssd, ssd_step, heads=4, dim=12, groups=2, width=20),
        "ssd of one group, limited": ssd_case(ssd, ssd_step, 2, 80, 1, 16, limits=(0.05, 0.5)),
        "scan": scan_case(selective_scan, selective_scan_step, channels=37, width=12),
    }


each_case = pytest.mark.parametrize("case", cases().values(), ids=cases())


@each_case
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 5e-3)], ids=str)
@pytest.mark.parametrize("lens", [[37, 16, 0, 1, 33, 5], [7, 16, 3]], ids=["chunks", "one chunk each"])
def test_rows_of_different_lengths(case, dtype, tolerance, lens):
    check_prompts(case, 16, dtype, tolerance, lens)


@pytest.mark.parametrize("width", [16, 200])
def test_chunks_of_several_tiles(width):
    check_prompts(ssd_case(ssd, ssd_step, 2, 16, 1, width), 128, torch.float32, 2e-4, lens=[200, 70, 128, 3])


@each_case
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_steps(case, dtype, tolerance):
    check_steps(case, dtype, tolerance)


@each_case
def test_a_row_divided_at_odd_places_is_the_same(case):
    check_division(case, 16, 24, [1, 2, 19], 2e-4)


@each_case
def test_rows_without_tokens_leave_their_slots(case):
    state = torch.randn(7, *case.shape)
    kept = state.clone()
    out = case.prompt(*case.inputs(0), case.parameters, state, rows_of([1, 2], [0, 0], [True, False], 16))
    assert len(out) == 0
    assert state.equal(kept)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(("groups", "size"), [(1, 80), (3, 12)])
def test_gated_norm(groups, size, norm_first):
    check_gated_norm(gated_rms_norm, groups, size, norm_first, torch.float32, 1e-5)


@each_case
@pytest.mark.parametrize("counts", [[0, 0, 0, 0], [1, 1, 2, 3], [5, 4, 7, 3]], ids=str)
def test_states_advance_by_the_accepted_drafts_only(case, counts):
    check_drafts(case, ssd_advance if case.prompt is ssd else selective_scan_advance, [5, 4, 7, 3], counts, 1e-5)
