"""Test that the kernels which quantize to FP8 compile for compute capability 9.0, and spill no registers, in the sizes of
models. That needs no GPU.

.venv/bin/python -m pytest -q tests/core/test_fp8_compiled.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dovetail.ops.triton.launch import INTERPRETED
from dovetail.ops.triton.norm import norm_warps
from dovetail_quantization.triton import norm, quantize
from sass import compile_source, printed, source_of

pytestmark = pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted, not compiled")
POINTERS = {
    "x": "*bf16",
    "weight": "*bf16",
    "total": "*bf16",
    "codes": "*fp8e4nv",
    "out": "*fp8e4nv",
    "scales": "*fp32",
}
POINTERS |= {"static": "*fp32", "residual": "*bf16", "eps": "fp32", "bound": "fp32"}


def compiled(kernel: Any, warps: int, constants: dict[str, Any], types: dict[str, str] | None = None) -> Any:
    """Return the code of a kernel. Arguments without a type are integers."""
    source = source_of(kernel, constants, POINTERS | (types or {}), ("*stride", "size", "width"))
    return compile_source(source, warps, enable_fp_fusion=True).asm


def check(code: Any, file: Path) -> None:
    ptx = code["ptx"]
    assert "cvt.rn.satfinite.e4m3x2" in ptx
    file.write_bytes(code["cubin"])
    found = printed("-res-usage", file)
    assert "STACK:0 " in found, "registers are spilled"
    assert "LOCAL:0 " in found
    assert ptx.count("griddepcontrol.wait") == 1


@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize("parts", [0, 4])
@pytest.mark.parametrize("width", [1024, 4096, pytest.param(8192, marks=pytest.mark.full)])
def test_norms_compile(width: int, parts: int, group: int | None, tmp_path: Path) -> None:
    constants = {"static": None, "ADD": True, "PARTS": parts, "STATIC": False, "GROUP": group or width, "BLOCK": width}
    types = {"x": "*fp32"} if parts else {}
    check(compiled(norm._quantized_norm, norm_warps(width, parts), constants, types), tmp_path / "kernel.cubin")


def test_the_norm_of_the_first_layer_compiles(tmp_path: Path) -> None:
    constants = {"residual": None, "ADD": False, "PARTS": 0, "STATIC": True, "GROUP": 4096, "BLOCK": 4096}
    check(compiled(norm._quantized_norm, norm_warps(4096, 0), constants), tmp_path / "kernel.cubin")


@pytest.mark.parametrize("gate", [0, 1, 2])
@pytest.mark.parametrize("block", [128, 4096])
def test_gates_compile(block: int, gate: int, tmp_path: Path) -> None:
    check(
        compiled(quantize._quantize, 8 if block > 1024 else 4, {"GATE": gate, "BLOCK": block}),
        tmp_path / "kernel.cubin",
    )


@pytest.mark.parametrize("gate", [0, 1])
def test_static_scales_compile(gate: int, tmp_path: Path) -> None:
    check(compiled(quantize._quantize_static, 4, {"GATE": gate, "BLOCK": 1024}), tmp_path / "kernel.cubin")
