"""Test the kernels of experts in FP8 as they are compiled for compute capability 9.0. That needs no GPU.

.venv/bin/python -m pytest -q tests/core/test_experts_fp8_compiled.py
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import triton.language as tl

from dovetail.ops.triton import experts_fp8
from dovetail.ops.triton.fp8_tiles import tiles_of
from dovetail.ops.triton.launch import INTERPRETED
from sass import compile_source, source_of, spilled_bytes, unwritten

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted, not compiled"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]
SIZES = (128, 8, 2048, 768)  # Qwen3-30B-A3B
TYPES = dict.fromkeys(("w",), "*fp8e4nv") | dict.fromkeys(("x_scale", "w_scale", "out_scale", "factors"), "*fp32")
TYPES |= dict.fromkeys(("order", "blocks", "used"), "*i32") | {"bias": "*bf16", "added": "*bf16"}
TYPES |= dict.fromkeys(("alpha", "limit", "offset", "bound"), "fp32")
QUICK = {(1, "gate_up", False), (16, "gate_up", True), (8192, "gate_up", False), (8192, "down", True)}
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.full)
    for case in itertools.product((1, 16, 256, 8192), ("gate_up", "down"), (False, True))
]


@pytest.mark.parametrize(("tokens", "product", "by_block"), CASES)
def test_tiles_of_qwen3_compile(tokens: int, product: str, by_block: bool, tmp_path: Path) -> None:
    check(tokens, product, tmp_path / "kernel.cubin", by_block=by_block)


@pytest.mark.parametrize("tokens", [256, *(pytest.param(tokens, marks=pytest.mark.full) for tokens in (2, 8192))])
@pytest.mark.parametrize("by_block", [False, pytest.param(True, marks=pytest.mark.full)])
def test_gate_and_up_with_adapters_compile(tokens: int, by_block: bool, tmp_path: Path) -> None:
    check(tokens, "gate_up", tmp_path / "kernel.cubin", by_block=by_block, adapted=True)
    assert not unwritten(tmp_path / "kernel.cubin")


def check(tokens: int, product: str, cubin: Path, *, by_block: bool, adapted: bool = False) -> None:
    """Check that weights and activations are copied to shared memory ahead, tensor cores multiply FP8 with FP8, and registers are not
    spilled in the loop."""
    tiles = tiles_of(tokens, *SIZES, 1.0, 128, by_block)
    tile, gated, one = tiles.gate_up if product == "gate_up" else tiles.down, product == "gate_up", tokens == 1
    coded = tiles.gate_up.block_n == 128 and not adapted
    constants: dict[str, Any] = {
        "TOP_K": 8, "SCALED": False, "BIAS": False, "ONE": one, "BY_BLOCK": by_block,
        "ONE_SCALE": True, "CODED": coded, "BLOCK_M": tiles.block_m, "BLOCK_N": tile.block_n, "GROUP": 128, "EVEN": True,
        "ARITHMETIC": False, **({"DTYPE": tl.bfloat16, "LIMITED": False, "ADDED": adapted} if gated else {"IN_PARTS": False}),
    }  # fmt: skip
    constants |= {} if adapted or not gated else {"added": None}
    kernel = experts_fp8._gate_up if gated else experts_fp8._down
    stored = "*fp8e4nv" if coded else "*bf16"
    types = TYPES | {"x": ("*bf16" if one else "*fp8e4nv") if gated else stored, "out": stored if gated else "*bf16"}
    source = source_of(kernel, constants, types, ("hidden", "size", "block_rows"))
    code = compile_source(source, tile.warps, tile.stages).asm
    bodies = [part.split("scf.yield", 1)[0] for part in code["ttgir"].split("scf.for")[1:]]
    (body,) = [body for body in bodies if re.search(r"\b(warp_group_dot|dot) ", body)]
    assert body.count("async_copy_global_to_local") == 2 * gated + (not gated) + (not (one and gated))
    assert not re.search(r"tt\.load .*f8", body)
    if not one:  # tiles of one token have too few rows
        assert set(re.findall(r"wgmma\.mma_async\.\S*f32\.(\S+)", code["ptx"])) == {"e4m3.e4m3"}
        assert "mma.sync" not in code["ptx"]
    cubin.write_bytes(code["cubin"])
    behind_the_loop = (384 if adapted else 256) if tiles.block_m == 128 and gated else 0
    assert spilled_bytes(cubin) <= behind_the_loop, "registers are spilled"
