"""torch_native: the conformance suite, on each of its ways through a batch.

Run: python -m pytest tests/plugins/test_attention_torch_native.py
"""

from __future__ import annotations

import pytest

from dovetail.testing.attention import AttentionSuite
from dovetail_attention import kernels, torch_native
from dovetail_attention.planner import CUDA, Limits, Planner


class TestTorchNative(AttentionSuite):
    name = "torch_native"
    device = "cpu"


SMALL = Limits(in_place=1 << 11, gather=1 << 13, waste=1 << 11, mask=256, short=3)


class TestTorchNativeInPieces(AttentionSuite):
    """Limits so small that long rows are cut, groups are split, and soft caps and sinks work in blocks."""

    name = "torch_native"
    device = "cpu"

    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch_native, "CPU", SMALL)
        monkeypatch.setattr(kernels, "_SCORES", 1 << 9)


class TestTorchNativeAsOnCuda(AttentionSuite):
    """What is done where the host does not see the page table, and PyTorch chooses the kernel."""

    name = "torch_native"
    device = "cpu"

    @pytest.fixture(autouse=True)
    def _like_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch_native, "CPU", CUDA)
        monkeypatch.setattr(torch_native, "CUDA", CUDA)
        monkeypatch.setattr(Planner, "_consecutive", lambda *_: False)
        monkeypatch.setattr(kernels, "_fused", kernels._sdpa)
