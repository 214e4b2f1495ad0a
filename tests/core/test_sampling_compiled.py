"""Test that the first step of sampling and of log-probabilities compiles for compute capability 9.0 without spilling registers, with
temperatures and without them. That needs no GPU.

.venv/bin/python -m pytest -q tests/core/test_sampling_compiled.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.ops.triton import sampling
from dovetail.ops.triton.launch import INTERPRETED
from sass import source_of, without_spills

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted, not compiled"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]
TYPES = {"logits": "*bf16", "temperature": "*fp32", "values": "*fp32", "ids": "*i32", "peaks": "*bf16"}
CONSTANTS = {"SUMS": True, "PEAKS": True, "BLOCK": sampling.BLOCK, "SUB": sampling.SUB}


@pytest.mark.parametrize("temperature", [True, False])
def test_statistics_compile(temperature: bool, tmp_path: Path) -> None:
    constants = CONSTANTS if temperature else CONSTANTS | {"temperature": None, "temperature_stride": 0}
    code = without_spills(source_of(sampling._stats_kernel, constants, TYPES), tmp_path / "kernel.cubin", 4)
    assert ("ld.global.b32" in code["ptx"]) == temperature, "logits are read in larger pieces"
