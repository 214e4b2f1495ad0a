"""Test that the kernels of the gated delta rule, and of short convolutions, compile for compute capability 9.0 in the sizes of Qwen3-Next and Kimi Linear,
use no more shared memory than there is, and spill no registers. That needs no GPU.

.venv/bin/python -m pytest -q tests/core/test_gated_delta_compiled.py
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends import nvidia as backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dovetail.ops.triton import gated_delta, short_conv
from dovetail.ops.triton.launch import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted, not compiled")
FLOATS = ("rate", "bias", "totals", "state")
INTEGERS = ("slots", "indptr", "fresh", "chunk_rows", "chunk_starts", "first_chunks", "starts", "counts")
HALVES = ("qkv", "a", "b", "reads", "changes", "before", "out", "x", "weight")
TYPES: dict[str, str] = {"scale": "fp32"}
TYPES |= dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(INTEGERS, "*i32") | dict.fromkeys(HALVES, "*bf16")
KERNELS = {
    "_step": ({"BLOCK_V": 32}, 4, 3),
    "_advance": ({"BLOCK_V": 32}, 4, 3),
    "_pass": ({"BLOCK_V": 32, "CHUNK": 64, "PRECISION": "tf32", "WRITES": True}, 4, 2),
    "_outputs": ({"BLOCK_V": 64, "CHUNK": 64, "PRECISION": "tf32", "SUB": 16}, 8, 3),
    "_solve": ({"BLOCK_V": 64, "CHUNK": 64, "PRECISION": "tf32", "SUB": 16}, 8, 3),
}
CONVOLUTIONS = {
    "_step": {"BLOCK": 512, "WIDTH": 4, "SILU": True, "BIAS": False},
    "_advance": {"BLOCK": 256, "BEFORE": 3},
    "_chunks": {"BLOCK": 64, "WIDTH": 4, "SILU": True, "BIAS": False, "CHUNK": 64, "WRITES": True},
}


def check_compiled(kernel: Any, constants: dict[str, Any], warps: int, stages: int, folder: Path) -> None:
    constants = {**constants, "PDL": True}
    signature = {arg: "constexpr" if arg in constants else TYPES.get(arg, "i32") for arg in kernel.arg_names}
    attrs = {
        (index,): [["tt.divisibility", 16]]
        for index, arg in enumerate(kernel.arg_names)
        if signature[arg].startswith("*") or arg.endswith("stride")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    options = {"num_warps": warps, "num_stages": stages, "launch_pdl": True}
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert found.metadata.shared <= 227 * 1024
    assert found.asm["ptx"].count("griddepcontrol.wait") == 1
    file = folder / "kernel.cubin"
    file.write_bytes(found.asm["cubin"])
    usage = [Path(backends.__file__).parent / "bin" / "cuobjdump", "-res-usage", file]
    printed = subprocess.run(usage, capture_output=True, text=True, check=True).stdout
    assert "STACK:0 " in printed, f"registers are spilled: {printed}"


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    ("name", "by_channel"),
    [
        ("_step", False),
        ("_advance", False),
        ("_pass", False),
        *[pytest.param(name, by_channel, marks=pytest.mark.full) for name in KERNELS for by_channel in (False, True)],
    ],
)
def test_kernels_compile_and_fit(name: str, by_channel: bool, tmp_path: Path) -> None:
    own, warps, stages = KERNELS[name]
    sizes = {"GROUP": 2, "KEY": 128, "VALUE": 128, "BY_CHANNEL": by_channel, "BLOCK_K": 128}
    check_compiled(getattr(gated_delta, name), sizes | own, warps, stages, tmp_path)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_compile_and_fit(name: str, tmp_path: Path) -> None:
    check_compiled(getattr(short_conv, name), CONVOLUTIONS[name], 8 if name == "_chunks" else 4, 3, tmp_path)
