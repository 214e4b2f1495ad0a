"""The graph cases of the attention suite fail for a backend whose graphs keep the lengths of their capture.

Run on a GPU machine: python -m pytest tests/gpu/test_suite_mutations_gpu.py
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from dovetail.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer
from dovetail.testing.attention import AttentionSuite
from dovetail.types import Batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Stale(AttentionBackend):
    """Wrap a backend, and capture copies of the lengths that ``plan_capture`` receives."""

    def __init__(self, sound: AttentionBackend) -> None:
        self._sound = sound
        self._captured: dict[int, Batch] = {}

    def plan(self, batch: Batch) -> None:
        self._sound.plan(batch)

    def plan_capture(self, batch: Batch) -> None:
        copied = copy.copy(batch)
        copied.kv_lens = batch.kv_lens.clone()
        self._captured[id(batch)] = copied
        self._sound.plan_capture(copied)

    def plan_replay(self, batch: Batch) -> None:
        self._sound.plan_replay(batch)

    def forward(self, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        return self._sound.forward(q, layer, self._captured.get(id(batch), batch))


class Sound(AttentionSuite):
    name = "triton"
    device = "cuda"


class Broken(Sound):
    def make(self, context: AttentionContext) -> AttentionBackend:
        return Stale(super().make(context))


@pytest.mark.parametrize(
    ("case", "arguments"),
    [
        ("test_graphs", (torch.bfloat16, 16, False)),
        ("test_graphs_over_fp8_pools", ("fp8_e5m2", False)),
        ("test_graphs_of_verify_rows", (torch.bfloat16, None)),
    ],
)
def test_stale_graphs_are_caught(case: str, arguments: tuple[Any, ...]):
    getattr(Sound(), case)(*arguments)
    with pytest.raises(AssertionError):
        getattr(Broken(), case)(*arguments)
