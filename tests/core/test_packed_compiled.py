"""Test that the kernels of weights in packed blocks compile for compute capability 9.0 and spill no registers. That needs no GPU.

.venv/bin/python -m pytest -q tests/core/test_packed_compiled.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.ops.packed_blocks import PACKED, PackedType
from dovetail.ops.triton import packed_experts, packed_plain
from dovetail.ops.triton.launch import INTERPRETED
from sass import source_of, unwritten, without_spills

pytestmark = pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted, not compiled")
POINTERS = {
    "x": "*bf16",
    "out": "*bf16",
    "y": "*bf16",
    "bias": "*bf16",
    "added": "*bf16",
    "w": "*i32",
    "weights": "*fp32",
    "order": "*i32",
}
POINTERS |= {"blocks": "*i32", "used": "*i32", "multiplier": "*i8", "offset_multiplier": "*i8"}
POINTERS |= {"parts": "*fp32", "arrived": "*i32"}
POINTERS |= dict.fromkeys(("alpha", "limit", "up_offset"), "fp32")
full = pytest.mark.full


def check(kernel: Any, constants: dict[str, Any], packing: PackedType, warps: int, stages: int, file: Path) -> str:
    """Compile a kernel for a type, check it, and return its assembly. Arguments without a type are integers."""
    constants |= {"BITS": packing.bits, "STEP": packing.step, "ZERO": packing.zero, "WHOLE": packing.whole}
    constants |= {"GROUP": packing.group or 0, "OFFSET": packing.offset}
    absent = {"multiplier": packing.group is None, "offset": not packing.offset}
    absent["offset_multiplier"] = absent["multiplier"] or absent["offset"]
    constants |= {name: None for name, is_absent in absent.items() if is_absent}
    scale = "*fp32" if packing.scale is torch.float32 else "*fp16"
    known = POINTERS | dict.fromkeys(("scale", "offset"), scale)
    source = source_of(kernel, constants, known, ("n", "k", "span", "words", "width"))
    code = without_spills(source, file, warps, stages, enable_fp_fusion=True)
    return code["ptx"]


@pytest.mark.parametrize(
    ("kind", "tokens", "gated"),
    [
        ("Q4_K", 1, True),
        ("Q6_K", 4096, False),
        *(pytest.param(kind, tokens, True, marks=full) for kind in PACKED for tokens in (1, 512, 4096)),
    ],
)
def test_experts_compile(kind: str, tokens: int, gated: bool, tmp_path: Path) -> None:
    check_experts(kind, tokens, tmp_path / "kernel.cubin", gated=gated)


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [("Q4_K", 512), *(pytest.param(kind, tokens, marks=full) for kind in PACKED for tokens in (1, 512, 4096))],
)
def test_gate_and_up_with_adapters_compile(kind: str, tokens: int, tmp_path: Path) -> None:
    check_experts(kind, tokens, tmp_path / "kernel.cubin", gated=True, adapted=True)
    assert not unwritten(tmp_path / "kernel.cubin")


def check_experts(kind: str, tokens: int, cubin: Path, *, gated: bool, adapted: bool = False) -> None:
    """Compile the kernel of experts. With adapters, one token is sorted like several."""
    packing = PACKED[kind]
    tile = packed_experts.tile_of(2048, packing)
    constants: dict[str, Any] = {
        "GATED": gated,
        "ADDED": adapted,
        "TOP_K": 8,
        "bias": None,
        "SCALED": False,
        "BIAS": False,
        "LIMITED": False,
    }
    constants |= {"IN_PARTS": False, "ONE": tokens == 1 and not adapted, "EVEN": True}
    constants |= {
        "BLOCK_M": packed_experts.block_of(tokens, 128, 8, 1.0),
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
    }
    constants |= {} if adapted else {"added": None}
    ptx = check(packed_experts._packed_product, constants, packing, tile.warps, tile.stages, cubin)
    assert "mma" in ptx


@pytest.mark.parametrize("kind", ["Q4_K", *(pytest.param(kind, marks=full) for kind in PACKED if kind != "Q4_K")])
def test_weights_are_written_in_rows(kind: str, tmp_path: Path) -> None:
    constants = {"BLOCK_N": packed_plain.BLOCK_N, "BLOCK_K": packed_plain.BLOCK_K}
    ptx = check(packed_plain.write_kernel, constants, PACKED[kind], 4, 3, tmp_path / "kernel.cubin")
    assert "st.global.v4" in ptx
