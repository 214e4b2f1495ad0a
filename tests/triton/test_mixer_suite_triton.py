"""Run the conformance suite of backends of layers with a state with the kernels of ``triton``, interpreted on the CPU. The
interpreter does not multiply bfloat16. In place of graphs the calls are repeated.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_mixer_suite_triton.py
"""

from __future__ import annotations

import dataclasses

import pytest

from dovetail.interfaces.mixer import MixerBackend, MixerContext
from dovetail.ops.triton.mixers import TritonMixer
from dovetail.registry.specs import ComponentSpec, Constraints
from dovetail.testing.mixer import MixerSuite


class Suite(MixerSuite):
    name = "triton"
    device = "cpu"

    @property
    def spec(self) -> ComponentSpec:
        return dataclasses.replace(super().spec, constraints=Constraints(dtypes=("float32", "float16")))

    def make(self, context: MixerContext) -> MixerBackend:
        return TritonMixer()


@pytest.mark.full
class TestTriton(Suite):
    """Run all cases."""


@pytest.mark.parametrize("operation", ["ssd", "selective_scan"])
def test_captured_drafts(operation: str) -> None:
    Suite().test_graphs_of_drafts(operation)
