"""Test the recurrences and gated norms of Mamba-2 and Mamba on CUDA against float64.

Run on a GPU machine: python -m pytest tests/gpu/test_ssd_gpu.py
"""

from __future__ import annotations

import pytest
import torch

from dovetail.ops.gated_norm import gated_rms_norm
from dovetail.ops.triton.selective_scan import selective_scan, selective_scan_advance, selective_scan_step
from dovetail.ops.triton.ssd import ssd, ssd_advance, ssd_step
from recurrences import check_division, check_drafts, check_gated_norm, check_prompts, check_steps, scan_case, ssd_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CASES = {
    "ssd of Mamba-2": lambda: ssd_case(ssd, ssd_step, 24, 64, 1, 128, device="cuda"),
    "ssd of Falcon-H1": lambda: ssd_case(ssd, ssd_step, 8, 128, 2, 256, device="cuda"),
    "ssd, odd sizes": lambda: ssd_case(ssd, ssd_step, 6, 80, 3, 20, device="cuda"),
    "scan of Jamba": lambda: scan_case(selective_scan, selective_scan_step, 1000, 16, device="cuda"),
}
# The largest errors. With 16 bits, states enter chunks rounded, and an output may be a small rest of large products with a state:
# float64 with the kernels' roundings only has 0.099 for chunks of 16 and 0.037 for others.
ROUNDED = {16: 0.11, 64: 4e-2, 128: 4e-2, 256: 4e-2}
each_case = pytest.mark.parametrize("make", CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@each_case
@pytest.mark.parametrize("chunk", ROUNDED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_different_lengths(make, chunk, dtype):
    tolerance = 2e-4 if dtype is torch.float32 else ROUNDED[chunk]
    check_prompts(make(), chunk, dtype, tolerance, lens=[300, 16, 0, 1, 257, 5])


@each_case
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)], ids=str)
def test_steps(make, dtype, tolerance):
    check_steps(make(), dtype, tolerance)


@each_case
def test_a_row_divided_at_odd_places_is_the_same(make):
    # the logarithms of decays add up to 1,274 within a chunk, where numbers in float32 are 1.2e-4 apart
    check_division(make(), 256, 700, [1, 2, 19, 290, 600], 4e-4)


@each_case
def test_a_captured_step_follows_its_slots(make):
    case = make()
    inputs, slots = case.inputs(3), torch.tensor([1, 2, 3], dtype=torch.int32, device="cuda")
    state = torch.randn(7, *case.shape, device="cuda")
    case.step(*inputs, case.parameters, state, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.step(*inputs, case.parameters, state, slots)
    slots.copy_(torch.tensor([5, 0, 4]))
    expected_state = state.clone()
    expected = case.step(*inputs, case.parameters, expected_state, slots)
    graph.replay()
    assert out.equal(expected)
    assert state.equal(expected_state)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(("groups", "size"), [(1, 8192), (8, 1024), (3, 80)])
def test_gated_norm(groups, size, norm_first, dtype, tolerance):
    check_gated_norm(gated_rms_norm, groups, size, norm_first, dtype, tolerance, "cuda")


@each_case
def test_states_advance_by_the_accepted_drafts_only(make):
    case = make()
    advance = ssd_advance if case.prompt is ssd else selective_scan_advance
    for counts in ([0, 0, 0, 0], [1, 1, 2, 3], [5, 4, 7, 3]):
        check_drafts(case, advance, [5, 4, 7, 3], counts, 2e-4)
