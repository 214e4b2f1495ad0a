"""Test that kernels of experts compile for compute capability 9.0 without spilling registers, in the sizes of models. That needs no
GPU.

.venv/bin/python -m pytest -q tests/core/test_experts_compiled.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dovetail.ops.triton import expert_low_rank, experts_many, experts_one, mxfp4_plain, routing
from dovetail.ops.triton.expert_tiles import many_tiles
from dovetail.ops.triton.launch import INTERPRETED
from sass import source_of, without_spills

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted, not compiled"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]
POINTERS = dict.fromkeys(("x", "w", "bias", "out"), "*bf16") | dict.fromkeys(("factors", "weights"), "*fp32")
POINTERS |= dict.fromkeys(("ids", "order", "blocks", "used", "counts", "totals"), "*i32")
POINTERS |= dict.fromkeys(("codes", "scales"), "*u8") | dict.fromkeys(("alpha", "limit", "offset"), "fp32")
SIZES = {"qwen3-30b-a3b": (2048, 768, 8), "gpt-oss-20b": (2880, 2880, 4)}


def compiled(
    kernel: Any, constants: dict[str, Any], types: dict[str, str], file: Path, warps: int, stages: int = 3
) -> Any:
    """Return the code of a kernel that spills no registers. Arguments without a type are integers."""
    source = source_of(kernel, constants, POINTERS | types, ("hidden", "size", "half", "rows"))
    return without_spills(source, file, warps, stages)


@pytest.mark.parametrize("product", ["gate_up", pytest.param("down", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["gpt-oss-20b", pytest.param("qwen3-30b-a3b", marks=pytest.mark.full)])
def test_products_of_many_pairs_compile(name: str, product: str, tmp_path: Path) -> None:
    (hidden, size, top_k), bias = SIZES[name], name == "gpt-oss-20b"
    tiles = many_tiles(hidden, size, 2)
    tile = tiles.gate_up if product == "gate_up" else tiles.down
    constants: dict[str, Any] = {
        "TOP_K": top_k, "SCALED": False, "BIAS": bias, "BLOCK_M": tiles.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
    }  # fmt: skip
    if not bias:
        constants["bias"] = None
    if product == "gate_up":
        constants |= {"LIMITED": bias, "EVEN": True}
        types = {"w": f"tensordesc<bf16[2,{tile.block_n},{tile.block_k}]>"}
        kernel: Any = experts_many._gate_up
    else:
        constants |= {"IN_PARTS": False}
        types = {"w": f"tensordesc<bf16[1,{tile.block_n},{tile.block_k}]>"}
        types |= {"x": f"tensordesc<bf16[{tiles.block_m},{tile.block_k}]>"}
        kernel = experts_many._down
    code = compiled(kernel, constants, types, tmp_path / "kernel.cubin", tile.warps, tile.stages)
    assert "wgmma" in code["ptx"]
    assert "cp.async.bulk.tensor" in code["ptx"]


@pytest.mark.parametrize("columns", [1024, pytest.param(4096, marks=pytest.mark.full)])
def test_down_of_one_token_reads_the_weight_before_it_waits(columns: int, tmp_path: Path) -> None:
    constants = {"SCALED": False, "BIAS": False, "bias": None, "BLOCK_N": 4, "BLOCK_K": columns}
    file, types = tmp_path / "kernel.cubin", {"out": "*fp32"}
    code = compiled(experts_one._down_early, constants, types, file, max(2, columns // 512))
    before, after = code["ptx"].split("griddepcontrol.wait")
    assert len(re.findall(r"ld\.global\S*\.v4", before)) >= 4
    assert "ld.global" in after


@pytest.mark.parametrize("experts", [32, pytest.param(256, marks=pytest.mark.full)])
def test_sorting_many_pairs_compiles(experts: int, tmp_path: Path) -> None:
    constants = {"CHUNK": routing.CHUNK, "BLOCK_M": 128, "BLOCK_E": experts}
    compiled(routing._place_chunk, constants, {}, tmp_path / "kernel.cubin", 4)


def test_dequantizing_a_layer_compiles(tmp_path: Path) -> None:
    constants = {"BLOCK_N": mxfp4_plain._ROWS, "HALF_K": mxfp4_plain._HALF_K, "ASSEMBLY": True}
    compiled(mxfp4_plain._dequantize, constants, {}, tmp_path / "kernel.cubin", 4)


@pytest.mark.full
@pytest.mark.parametrize("rows", [8, 16, 32, 64, 128])
def test_adapters_of_experts_compile(rows: int, tmp_path: Path) -> None:
    types = (
        dict.fromkeys(("a", "b"), "*bf16")
        | dict.fromkeys(("ranks", "places", "tiles", "rows"), "*i32")
        | {"low": "*fp32"}
    )
    shared = {"TOP_K": 8, "RANK": 64, "RANK_BLOCK": 16, "BLOCK_M": rows}
    file, warps = tmp_path / "kernel.cubin", expert_low_rank.warps_of(rows)
    for by_pair in (False, True):
        constants = shared | {"BY_PAIR": by_pair, "BLOCK_K": expert_low_rank.INPUT_BLOCK}
        compiled(expert_low_rank._shrink, constants, types, file, warps)
        constants = shared | {"ONTO": by_pair, "SCALED": False, "ROW_BLOCK": expert_low_rank.ROW_BLOCK}
        compiled(expert_low_rank._expand, constants, types, file, warps)
