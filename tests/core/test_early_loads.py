"""What the compiler makes of products that load weights before they wait (``ops/triton/matmul.py``): their source leaves it to
Triton's pipeline which loads come first, and a load of ``x`` there would now and then read what is not written yet. Compiled
for compute capability 9.0, which needs no GPU.

.venv/bin/python -m pytest -q tests/core/test_early_loads.py
"""

import re

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dovetail.ops.triton import invariant, matmul
from dovetail.ops.triton.launch import INTERPRETED
from dovetail.ops.triton.tuning import MEASURED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted, not compiled")

TILES = sorted(
    {tile for tiles in MEASURED.values() for tile in tiles.values() if tile is not None and tile.early}
    | {
        invariant.tile_of(16, n, k, invariant.split_of(n, k))
        for n, k in ((4096, 256), (256, 704), (1000, 96), (640, 2560))
    }
)
WAIT = "griddepcontrol.wait"


def compiled(tile, form, in_order):
    """The kernel of a tile for float16: in Triton's GPU language, and in the assembler's."""
    constants = {
        "GATED": form == "gated", "BIAS": form != "parts", "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
        "SPLIT": tile.split, "AHEAD": 0, "EARLY": True, "IN_ORDER": in_order, "PARTS": form == "parts",
        "PDL": True,
    }  # fmt: skip
    pointers = {"x": "*fp16", "w": "*fp16", "bias": "*fp16", "y": "*fp16", "parts": "*fp32", "arrived": "*i32"}
    if form == "parts":
        pointers["y"] = "*fp32"
    signature = pointers | dict.fromkeys(("m", "n", "k", "span"), "i32") | dict.fromkeys(constants, "constexpr")
    names = matmul._few_rows.arg_names
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in (*pointers, "n", "k", "span")}
    source = ASTSource(fn=matmul._few_rows, signature=signature, constexprs=constants, attrs=attrs)
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "launch_pdl": True}
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm
    return found["ttgir"], found["ptx"]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("form", ["whole", "gated", "parts"])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_weights_alone_are_loaded_before_the_wait(tile, form, in_order):
    text, assembly = compiled(tile, form, in_order)
    assert text.count(WAIT) == assembly.count(WAIT) == 1
    before, after = text.split(WAIT)
    weights, tokens = f"tensor<{tile.block_n}x{tile.block_k}x!tt.ptr", f"tensor<{tile.block_m}x{tile.block_k}x!tt.ptr"
    loads = [line for line in before.splitlines() if re.search(r"tt\.load|async_copy_global_to_local|tt\.atomic", line)]
    assert len(loads) == tile.stages - 1, "one stage is loaded while another is multiplied"
    assert all(weights in line and tokens not in line for line in loads)
    assert any(tokens in line for line in after.splitlines() if "tt.load" in line), "x is read behind the wait"
    prologue = assembly.split("\n$L__BB")[0]  # the loop, and the wait in it, come behind
    assert WAIT not in prologue
    assert "cp.async.cg.shared.global" in prologue
    assert not re.search(r"\b(ld|st|atom|red)(\.\w+)*\.global", prologue)
