"""Test that decode attention compiles for compute capability 9.0 without spilling registers, and over pools of 8 bits without conversions to
bfloat16, which take longer than reading the pool, and without loads of single bytes. That needs no GPU.

.venv/bin/python -m pytest -q tests/core/test_decode_compiled.py
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dovetail.ops.triton import decode
from dovetail.ops.triton.launch import INTERPRETED
from sass import printed, source_of, unwritten, without_spills

pytestmark = pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted, not compiled")
POINTERS = {"q": "*bf16", "keys": "*fp8e4nv", "values": "*i16", "table": "*i32", "kv_lens": "*i32", "sinks": "*fp32"}
TYPES = POINTERS | {"out": "*bf16", "lse": "*fp32", "parts": "*fp32", "scale": "fp32", "soft_cap": "fp32"}
CONSTANTS = {
    "PAGE": 16, "KV_HEADS": 8, "KEY_DIM": 128, "BLOCK_K": 128, "REST": 0, "BLOCK_REST": 16, "VALUE_DIM": 128, "BLOCK_V": 128,
    "K_HEAD": 128, "V_HEAD": 128, "SAME": False, "PAIRS": True, "GROUP": 4, "BLOCK_HEADS": 16, "HEAD_BLOCKS": 1, "WINDOW": False,
    "SOFT_CAP": False, "SINKS": False, "SPLIT": True,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_parts_need_not_be_whole_blocks(tmp_path: Path) -> None:
    """Registers for ``LARGE_TILE_RESIDENT`` programs suffice."""
    tile = decode.LARGE_TILE
    unit = decode.unit_of(tile, 3, 1, 132)
    assert unit < tile.keys
    constants = CONSTANTS | {"BLOCK_N": tile.keys, "UNIT": unit, "PAIRS": False}
    types = TYPES | {"keys": "*bf16", "values": "*bf16"}
    file = tmp_path / "kernel.cubin"
    without_spills(
        source_of(decode._decode, constants, types, ("q_row", "q_head")), file, tile.num_warps, tile.num_stages
    )
    registers = re.search(r"REG:(\d+)", printed("-res-usage", file))
    assert registers is not None
    assert int(registers[1]) * 32 * tile.num_warps * decode.LARGE_TILE_RESIDENT <= 65536


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("rows", [1, 256])
def test_pools_of_8_bits_are_converted_by_pairs(rows: int, tmp_path: Path) -> None:
    tile = decode.tiling(256, 128, rows * 8, 132, eight_bits=True)
    file = tmp_path / "kernel.cubin"
    source = source_of(
        decode._decode, CONSTANTS | {"BLOCK_N": tile.keys, "UNIT": tile.keys}, TYPES, ("q_row", "q_head")
    )
    found = without_spills(source, file, tile.num_warps, tile.num_stages)
    code = printed("-sass", file)
    assert "F2FP.F16.E4M3" in code
    assert "F2F." not in code
    assert "LDS.U8" not in code
    assert found["ptx"].count("ld.global.b16") == 0
    assert not unwritten(file)
