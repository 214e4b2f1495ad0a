"""Test that the kernels of the recurrences of Mamba-2 and Mamba that keep states compile for compute capability 9.0, in the sizes of
published models. That needs no GPU.

.venv/bin/python -m pytest -q tests/core/test_ssd_compiled.py
"""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.ops.triton import selective_scan, ssd
from dovetail.ops.triton.launch import INTERPRETED
from sass import compile_source, source_of

pytestmark = pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted, not compiled")
FLOATS = ("a", "d", "dt_bias", "state", "states", "totals", "sizes")
INTEGERS = ("slots", "indptr", "fresh", "chunk_rows", "chunk_starts", "first_chunks", "saves", "starts", "counts")
TYPES: dict[str, str] = dict.fromkeys(("low", "high"), "fp32") | dict.fromkeys(FLOATS, "*fp32")
TYPES |= dict.fromkeys(INTEGERS, "*i32") | dict.fromkeys(("x", "dt", "b", "c", "out", "entering"), "*bf16")
KERNELS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "ssd advance": (ssd._advance, {"BLOCK_P": 64, "BLOCK_N": 128}, 4),
    "ssd step": (ssd._step, {"BLOCK_P": 64, "BLOCK_N": 128}, 4),
    "ssd drafts": (ssd._pass_states, {"CHUNK": 64, "BLOCK": 1024, "WRITES": False, "SAVES": False}, 4),
    "ssd prompts": (ssd._pass_states, {"CHUNK": 64, "BLOCK": 1024, "WRITES": True, "SAVES": True}, 4),
    "scan advance": (selective_scan._advance_rows, {"BLOCK_C": 32, "BLOCK_N": 16}, 1),
    "scan step": (selective_scan._step, {"BLOCK_C": 32, "BLOCK_N": 16}, 1),
    "scan passes": (selective_scan._pass_ends, {"BLOCK_C": 32, "BLOCK_N": 16, "WRITES": True, "SAVES": True}, 1),
    "scan drafts": (
        selective_scan._chunk_outputs, {"WHOLE": True, "CHUNK": 64, "BLOCK_C": 32, "BLOCK_N": 16, "WRITES": False}, 1,
    ),
    "scan prompts": (
        selective_scan._chunk_outputs, {"WHOLE": True, "CHUNK": 64, "BLOCK_C": 32, "BLOCK_N": 16, "WRITES": True}, 1,
    ),
}  # fmt: skip
ALWAYS = ("ssd advance", "scan advance")


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    "name", [*ALWAYS, *(pytest.param(name, marks=pytest.mark.full) for name in KERNELS if name not in ALWAYS)]
)
def test_kernels_compile(name: str) -> None:
    kernel, constants, warps = KERNELS[name]
    found = compile_source(source_of(kernel, constants, TYPES, ("*stride",)), warps)
    assert found.metadata.shared <= 227 * 1024
    assert found.asm["ptx"].count("griddepcontrol.wait") == 1
