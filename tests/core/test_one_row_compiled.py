"""Test that kernels of layers of one token compile for compute capability 9.0 without spilling registers, in the sizes of models. That
needs no GPU.

.venv/bin/python -m pytest -q tests/core/test_one_row_compiled.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import triton

from dovetail.ops.triton import decode_projected, experts_one, one_row
from dovetail.ops.triton.launch import INTERPRETED
from sass import compile_source, source_of, spilled_bytes

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted, not compiled"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]
TYPES = dict.fromkeys(
    ("x", "norm", "w", "y", "normed", "stream", "out", "qkv", "keys", "values", "q_norm", "k_norm"), "*bf16"
)
TYPES |= dict.fromkeys(("ids", "page_table", "kv_lens"), "*i32") | dict.fromkeys(("positions", "out_loc"), "*i64")
TYPES |= dict.fromkeys(("table", "parts", "part_lse", "factors"), "*fp32") | dict.fromkeys(("eps", "scale"), "fp32")


def compiled(
    kernel: Any, constants: dict[str, Any], file: Path, warps: int, stages: int = 3, most_spilled: int = 0
) -> Any:
    """Return the code of a kernel that spills at most this number of bytes of registers. Arguments without a type are integers."""
    source = source_of(kernel, constants, TYPES, ("n", "hidden"))
    code = compile_source(source, warps, stages).asm
    file.write_bytes(code["cubin"])
    assert spilled_bytes(file) <= most_spilled, "registers are spilled"
    return code


def before_wait(code: Any) -> str:
    return code["ptx"].partition("griddepcontrol.wait")[0]


@pytest.mark.parametrize("gated", [0, 1])
@pytest.mark.parametrize("size", one_row.NORMED)
def test_products_request_their_weights_before_the_wait(size: int, gated: int, tmp_path: Path) -> None:
    constants = {"GATED": gated, "SIZE": size, "BLOCK_N": 8}
    code = compiled(one_row._normed_product, constants, tmp_path / "product", max(2, size // 512))
    assert before_wait(code).count("evict_first") == code["ptx"].count("evict_first") > 0
    constants = {"K": 2 * size, "BLOCK_N": 2, "BLOCK_K": size, "AHEAD": 16}
    code = compiled(one_row._added_product, constants, tmp_path / "added", 4)
    assert "prefetch.global.L2" in before_wait(code)
    compiled(one_row._normed_logits, {"SIZE": size, "BLOCK_N": 4}, tmp_path / "logits", 4)


def test_experts_are_fetched_before_the_wait(tmp_path: Path) -> None:
    options = dict.fromkeys(("SCALED", "BIAS", "LIMITED", "UNGATED"), False)
    constants: dict[str, Any] = {**options, "bias": None, "BLOCK_N": 2, "BLOCK_K": 2048, "WHOLE": True}
    compiled(experts_one._gate_up_one, constants, tmp_path / "gate_up", 4)
    constants = {"SIZE": 768, "TOP_K": 8, "PIECE": 256, "SCALED": False}
    code = compiled(experts_one._down_added, constants, tmp_path / "down", 4)
    assert before_wait(code).count("evict_first") == code["ptx"].count("evict_first") > 0


@pytest.mark.parametrize(("heads", "kv_heads", "size", "norm"), [(32, 4, 128, True), (32, 8, 64, False)])
@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.parametrize("tiles", [4, 8, 16, 32])
def test_projected_rows_compile(
    heads: int, kv_heads: int, size: int, norm: bool, leads: bool, tiles: int, tmp_path: Path
) -> None:
    tile = decode_projected.tile_of(tiles, heads // kv_heads)
    constants: dict[str, Any] = {
        "HEADS": heads, "KV_HEADS": kv_heads, "SIZE": size, "PAGE": 16, "NORM": norm, "BLOCK_HEADS": 16,
        "UNIT": tile.unit, "KEYS": tile.keys, "MORE_KEYS": tile.more_keys, "LEADS": leads,
    }  # fmt: skip
    spilled = 8 if tiles > 16 else 0  # two words of 4 warps that hold 128 keys and values
    code = compiled(
        decode_projected._attend_rows, constants, tmp_path / "attend", tile.num_warps, tile.num_stages, spilled
    )
    early = "ld.global.cg" in before_wait(code)
    assert early != leads, "a kernel that leads reads nothing early"
    constants = {
        "SIZE": size,
        "BLOCK_SPLITS": triton.next_power_of_2(tile.splits),
        "UNIT": tile.unit,
        "WIDTH": tile.width,
    }
    compiled(decode_projected._merge_rows, constants, tmp_path / "merge", 1)
