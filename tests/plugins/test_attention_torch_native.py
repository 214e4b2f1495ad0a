"""Run the conformance suite of torch_native on each of its code paths.

Run: python -m pytest tests/plugins/test_attention_torch_native.py
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.testing.attention import AttentionSuite
from dovetail.testing.batches import make_batch, make_page_table
from dovetail_attention import kernels, torch_native
from dovetail_attention.planner import CPU, CUDA, Group, Planner, PlannerCosts
from window_holes import WINDOWED_STEPS, check_holes


class TestTorchNative(AttentionSuite):
    name = "torch_native"
    device = "cpu"


SMALL = PlannerCosts(in_place=1 << 11, gather=1 << 13, waste=1 << 11, mask=256, short=8, shared=1)


@pytest.mark.sample(11)
class TestTorchNativeWithoutACompiler(AttentionSuite):
    """Test PyTorch's kernels alone."""

    name = "torch_native"
    device = "cpu"

    @pytest.fixture(autouse=True)
    def _not_compiled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch_native, "kernels", lambda dtype: None)


@pytest.mark.sample(11)
class TestTorchNativeInPieces(AttentionSuite):
    """Test with limits so small that long rows are cut, groups are split, and soft caps and sinks are computed in
    blocks."""

    name = "torch_native"
    device = "cpu"

    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch_native, "kernels", lambda dtype: None)
        monkeypatch.setattr(torch_native, "CPU", SMALL)
        monkeypatch.setattr(kernels, "_SCORES", 1 << 9)


@pytest.mark.sample(11)
class TestTorchNativeAsOnCuda(AttentionSuite):
    """Test the code paths for a page table that the host does not see, and for kernels that PyTorch chooses."""

    name = "torch_native"
    device = "cpu"

    @pytest.fixture(autouse=True)
    def _like_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch_native, "kernels", lambda dtype: None)
        monkeypatch.setattr(torch_native, "CPU", CUDA)
        monkeypatch.setattr(torch_native, "CUDA", CUDA)
        monkeypatch.setattr(Planner, "_consecutive", lambda *_: False)
        monkeypatch.setattr(kernels, "_fused", kernels._sdpa)


def groups_of(
    prefix: list[int], extend: list[int], *, seed: int | None = 0, window: int | None = None, limits: PlannerCosts = CPU
) -> list[Group]:
    lens = [a + b for a, b in zip(prefix, extend, strict=True)]
    table = make_page_table(lens, 4, 8 + sum(lens), seed=seed)
    planner = Planner(make_batch(4, table, prefix, extend), 4, 512, torch.float32, limits)
    return planner.groups(window)


def test_one_row_of_consecutive_pages_is_read_in_place():
    (group,) = groups_of([199], [1], seed=None)
    assert (group.index, group.mask, group.start, group.keys) == (None, None, 4, 200)


def test_a_window_begins_in_place_too():
    (group,) = groups_of([199], [1], seed=None, window=10)
    assert (group.index, group.mask, group.start, group.keys) == (None, None, 4 + 190, 10)


def test_rows_of_one_length_need_no_mask():
    (group,) = groups_of([99] * 16, [1] * 16)
    assert (group.rows, group.keys, group.mask, group.tail) == (16, 100, None, None)


def test_a_prompt_needs_no_mask():
    (group,) = groups_of([0], [500])
    assert group.causal
    assert group.mask is None


def test_rows_of_very_different_lengths_are_not_filled_up():
    groups = groups_of([9] * 8 + [1999], [1] * 9)
    assert [(group.rows, group.keys) for group in groups] == [(1, 2000), (8, 10)]


row = st.tuples(st.integers(0, 300), st.one_of(st.just(1), st.integers(1, 60)))


@settings(max_examples=150)
@given(
    rows=st.lists(row, min_size=1, max_size=12),
    window=st.sampled_from([None, 1, 20]),
    limits=st.sampled_from([CPU, SMALL, CUDA]),
    seed=st.sampled_from([None, 0]),
)
def test_every_token_is_in_one_group_and_a_single_group_is_in_order(
    rows: list[tuple[int, int]], window: int | None, limits: PlannerCosts, seed: int | None
):
    prefix, extend = (list(x) for x in zip(*rows, strict=True))
    groups = groups_of(prefix, extend, seed=seed, window=window, limits=limits)
    everything = torch.arange(sum(extend))
    tokens = torch.cat([everything[group.tokens] for group in groups])
    assert torch.equal(tokens.sort().values, everything)
    if len(groups) == 1:
        assert torch.equal(tokens, everything)
    for group in groups:
        assert len(everything[group.tokens]) == group.rows * group.queries
        filled = max(1, limits.gather // 512)
        assert group.rows == 1 or group.rows * group.keys <= filled


@pytest.mark.parametrize("window", [5, 18])
@pytest.mark.parametrize("step", WINDOWED_STEPS)
@pytest.mark.parametrize("suite", [TestTorchNative, TestTorchNativeWithoutACompiler, TestTorchNativeInPieces])
def test_pages_behind_the_window_may_be_gone(
    monkeypatch: pytest.MonkeyPatch, suite: type[AttentionSuite], step: str, window: int
) -> None:
    if suite is not TestTorchNative:
        monkeypatch.setattr(torch_native, "kernels", lambda dtype: None)
    if suite is TestTorchNativeInPieces:
        monkeypatch.setattr(torch_native, "CPU", SMALL)
        monkeypatch.setattr(kernels, "_SCORES", 1 << 9)
    check_holes(suite().make, step, window)
