"""Test the backends of layers with a state on CUDA with their conformance suite, graphs included, and that graphs that keep what
they computed at their capture fail it.

Run on a GPU machine: python -m pytest tests/gpu/test_mixers_gpu.py
"""

from __future__ import annotations

import pytest
import torch

from dovetail.interfaces.mixer import MixerBackend, MixerContext
from dovetail.ops.triton.mixers import TritonMixer
from dovetail.testing.mixer import MixerSuite

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class TestTritonOnCuda(MixerSuite):
    name = "triton"
    device = "cuda"


class TestTorchOnCuda(MixerSuite):
    name = "torch_native"
    device = "cuda"


class KeepsTheFirstSlots(TritonMixer):
    """Compute decode steps in a copy of the slots of the first call."""

    first: torch.Tensor | None = None

    def short_conv_step(self, x, weight, bias, state, slots, activation="silu"):
        if self.first is None or len(self.first) != len(slots):
            self.first = slots.clone()
        return super().short_conv_step(x, weight, bias, state, self.first, activation)


class KeepsSlots(TestTritonOnCuda):
    __test__ = False

    def make(self, context: MixerContext) -> MixerBackend:
        return KeepsTheFirstSlots()


def test_the_suite_finds_graphs_that_keep_their_slots() -> None:
    TestTritonOnCuda().test_graphs_of_decode_steps("short_conv")
    with pytest.raises(AssertionError, match=r"wrong|changed"):
        KeepsSlots().test_graphs_of_decode_steps("short_conv")
