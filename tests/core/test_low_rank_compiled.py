"""Test that the kernels of adapters (LoRA) compile for compute capability 9.0 without spilling registers, in the sizes of a model.
That needs no GPU.

.venv/bin/python -m pytest -q tests/core/test_low_rank_compiled.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dovetail.ops.triton import adapted_rows, low_rank_few, one_adapter
from dovetail.ops.triton.launch import INTERPRETED
from dovetail.ops.triton.tuning import tile_of
from sass import printed, source_of, unwritten, without_spills

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted, not compiled"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]
POINTERS = dict.fromkeys(("x", "w", "y", "out", "low", "a", "b"), "*bf16") | {"sums": "*fp32", "parts": "*fp32"}
POINTERS |= dict.fromkeys(
    ("arrived", "ranks", "order", "tiles", "slots", "count", "groups", "places", "blocks"), "*i32"
)
UNALIGNED = {"ranks", "order", "tiles", "slots", "count", "groups", "places", "blocks", "m", "num_tiles", "num_parts"}


def compiled(
    kernel: Any,
    file: Path,
    constants: dict[str, Any],
    warps: int = 4,
    stages: int = 3,
    types: dict[str, str] | None = None,
) -> Any:
    """Return the code of a kernel that spills no registers. Arguments without a type are integers."""
    source = source_of(kernel, constants, POINTERS | (types or {}), ("*",), UNALIGNED)
    return without_spills(source, file, warps, stages)


@pytest.mark.parametrize(
    ("kernel", "few"),
    [
        ("shrink", False),
        ("shrink_each", False),
        ("shrink", True),
        ("expand", False),
        ("expand", True),
        ("expand_gate", False),
    ],
)
def test_kernels_of_matrices_compile(kernel: str, few: bool, tmp_path: Path) -> None:
    common, block = {"RANK": 16, "TILE": 16}, low_rank_few.OUTPUT_BLOCK
    if kernel == "shrink_each":
        each = {"RANK": 16, "ROWS": low_rank_few.EACH_SIZE // 4096, "BLOCK": 4096, "LEADS": True}
        compiled(low_rank_few._shrink_each, tmp_path / "kernel.cubin", each, low_rank_few.EACH_WARPS, 1)
        return
    if kernel != "expand_gate":
        common["TOGETHER"] = few
    chosen: dict[str, tuple[Any, dict[str, Any]]] = {
        "shrink": (low_rank_few._shrink, {"INPUT_BLOCK": low_rank_few.INPUT_BLOCK[few], "SPLITS": 8, "LEADS": True}),
        "expand": (low_rank_few._expand, {"BLOCK_N": 64 if few else block, "ROW_BLOCK": low_rank_few.ROW_BLOCK}),
        "expand_gate": (low_rank_few._expand_gate, {"GATED": True, "BLOCK_N": block // 2, "WHOLE": True}),
    }
    compiled(chosen[kernel][0], tmp_path / "kernel.cubin", common | chosen[kernel][1], stages=1)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    ("n", "k", "form"),
    [
        (28672, 4096, "gated"),
        pytest.param(6144, 4096, "whole", marks=pytest.mark.full),
        pytest.param(4096, 4096, "parts", marks=pytest.mark.full),
        pytest.param(4096, 14336, "parts", marks=pytest.mark.full),
    ],
)
def test_products_that_add_adapters_load_weights_before_they_wait(
    n: int, k: int, form: str, several: bool, tmp_path: Path
) -> None:
    tile = tile_of(64, n, k)
    assert tile is not None
    constants = {
        "bias": None, "GATED": form == "gated", "BIAS": False, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k, "SPLIT": tile.split, "IN_PARTS": form == "parts", "RANK": 16, "ROW_BLOCK": adapted_rows.ROW_BLOCK,
    }  # fmt: skip
    kernel = adapted_rows._product_then_adapters if several else adapted_rows._adapted_rows
    if several:
        constants |= {name: getattr(adapted_rows, f"SEVERAL_{name}") for name in ("STEP", "DEPTH", "AHEAD")}
    else:
        constants |= {"ADDS": True, **{name: getattr(adapted_rows, name) for name in ("FIRST", "STEP", "AHEAD")}}
    types = {"y": "*fp32"} if form == "parts" else {}
    file = tmp_path / "kernel.cubin"
    ptx = compiled(kernel, file, constants, tile.warps, tile.stages, types)["ptx"]
    assert max(ptx.index("cp.async.cg"), ptx.index("prefetch.global.L2")) < ptx.index("griddepcontrol.wait")
    loops = [left for left in re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx) if int(left) > 0]
    assert len(loops) == (2 if several else 1), "each loop waits for the oldest part of what it has requested"
    assert unwritten(file) == []


@pytest.mark.parametrize(
    ("n", "k", "form"), [(6144, 4096, "whole"), (4096, 4096, "parts"), (28672, 4096, "gated"), (4096, 14336, "parts")]
)
def test_products_with_the_only_adapter_do_not_wait_for_each_other(n: int, k: int, form: str, tmp_path: Path) -> None:
    """With two accumulators, it easily happens that ptxas lets each product wait for the one before it."""
    tile = one_adapter.one_adapter_tile(n, k, 16, gated=form == "gated", itemsize=2)
    assert tile is not None
    constants = {
        "bias": None, "GATED": form == "gated", "BIAS": False, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k, "SPLIT": tile.split, "AHEAD": tile.ahead, "IN_PARTS": form == "parts", "RANK": 16,
        "ROW_BLOCK": one_adapter.ROW_BLOCK,
    }  # fmt: skip
    types, file = {"y": "*fp32"} if form == "parts" else {}, tmp_path / "kernel.cubin"
    code = compiled(one_adapter._one_adapter, file, constants, tile.warps, tile.stages, types)
    waits = printed("-sass", file).count("WARPGROUP.DEPBAR")
    assert waits == 3, "once in the loop, behind it, and for the second matrix"
    # a stage that is copied while a product runs has other memory than what the product reads
    assert re.findall(r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x", code["ttgir"]) == [str(tile.stages)] * 3
    before, after = code["ptx"].split("griddepcontrol.wait")
    assert "cp.async" not in before, "the pipeline contains the inputs of the layer"
    assert "cp.async" in after
    assert unwritten(file) == []


def test_ranks_of_one_adapter():
    """Other ranks have the kernels for few adapters. Rows of first matrices in one program are a power of two."""
    ranks = (16, 32, 48, 64, 80)
    tiles = {
        gated: [one_adapter.one_adapter_tile(28672, 4096, rank, gated=gated, itemsize=2) for rank in ranks]
        for gated in (False, True)
    }
    assert [tile is not None for tile in tiles[False]] == [True, True, False, True, False]
    assert [tile is not None for tile in tiles[True]] == [True, True, False, False, False]
