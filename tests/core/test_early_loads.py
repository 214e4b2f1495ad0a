"""What the compiler makes of kernels that read before they wait for the one before (``ops/triton/launch.py``). Products leave it
to Triton's pipeline which loads come first, and a load of ``x`` there would now and then read what is not written yet. Compiled
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
from dovetail_attention.triton import attend as attend_module
from dovetail_quantization.triton import few_rows as fp8_rows

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
    """Return the kernel of a tile for float16: in Triton's GPU language, and in assembler."""
    constants = {
        "GATED": form == "gated", "BIAS": form != "parts", "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
        "SPLIT": tile.split, "AHEAD": 0, "EARLY": True, "IN_ORDER": in_order, "IN_PARTS": form == "parts",
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


@pytest.mark.sample(5)
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("form", ["whole", "gated", "parts"])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_weights_alone_are_loaded_before_the_wait(tile, form, in_order):
    check(tile, *compiled(tile, form, in_order))


def compiled_fp8(tile, form, blocks):
    """Return the kernel of a tile for a weight in FP8 and rows of 16 bits, like ``compiled``."""
    constants = {
        "GATED": form == "gated", "BIAS": form != "parts", "QUANTIZED": False, "BLOCKS": blocks,
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
        "SPLIT": tile.split, "EARLY": True, "IN_PARTS": form == "parts", "PDL": True,
    }  # fmt: skip
    pointers = {"x": "*bf16", "row_scale": "*fp32", "w": "*fp8e4nv", "weight_scale": "*fp32", "bias": "*bf16"}
    pointers |= {"y": "*fp32" if form == "parts" else "*bf16", "parts": "*fp32", "arrived": "*i32"}
    signature = pointers | dict.fromkeys(("m", "n", "k", "span"), "i32") | dict.fromkeys(constants, "constexpr")
    names = fp8_rows._few_rows.arg_names
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in (*pointers, "n", "k", "span")}
    source = ASTSource(fn=fp8_rows._few_rows, signature=signature, constexprs=constants, attrs=attrs)
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "launch_pdl": True}
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm
    return found["ttgir"], found["ptx"]


@pytest.mark.sample(5)
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("form", ["whole", "gated", "parts"])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (28672, 4096), (256, 640)])
def test_fp8_weights_alone_are_loaded_before_the_wait(n, k, blocks, form):
    tile = fp8_rows.tile_of(16, n, k, quantized=False, blocks=blocks)
    text, assembly = compiled_fp8(tile, form, blocks)
    check(tile, text, assembly)
    assert "e4m3.e4m3" in assembly, "tensor cores multiply FP8"


def check(tile, text, assembly):
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


def attend(leads, ahead):
    """Return what attention does to memory and to the kernels around it, in the order of its program, with the types
    that it reads."""
    kernel = attend_module._attend
    pointers = {
        "q": "*fp16", "k": "*fp16", "v": "*fp16", "out": "*fp16", "partial": "*fp32", "lse": "*fp32", "records": "*i32", "count": "*i32",
        "table": "*i32", "positions": "*i64", "tree": "*u8", "sinks": "*fp32",
    }  # fmt: skip
    numbers = dict.fromkeys(("q_token", "q_head", "table_row", "tree_row", "tree_width", "window"), "i32")
    constants = {
        "PAGE": 16, "KV_HEADS": 8, "KEY_DIM": 128, "BLOCK_K": 128, "REST": 0, "BLOCK_REST": 16, "VALUE_DIM": 128, "BLOCK_V": 128,
        "K_HEAD": 128, "V_HEAD": 128, "SAME": False, "GROUP": 3, "ROWS": 32, "KEYS": 64, "CAUSAL": True, "TREE": False,
        "WINDOW": False, "CAP": False, "SINKS": False, "SCALED": False, "HALF": False, "PAIRS": False, "CHUNK": 0, "RECORD": 8, "FEWER": True, "LEADS": leads, "AHEAD": ahead, "PDL": True,
        "k_scales": None, "v_scales": None,
    }  # fmt: skip
    signature = pointers | numbers | {"scale": "fp32", "cap": "fp32"} | dict.fromkeys(constants, "constexpr")
    attrs = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    options = {"num_warps": 4, "num_stages": 3, "launch_pdl": True}
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ttgir"]
    found = r"grid_dependency_\w+|prefetch|tt\.load .*?: .*?!tt\.ptr<\w+>|async_copy_global_to_local|tt\.store|scf\.for|tt\.return"
    return re.findall(found, text)


fusion = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


@fusion
def test_leading_attention_waits_before_anything_starts_behind_it():
    first, second, *rest = attend(leads=True, ahead=False)
    assert (first, second) == ("grid_dependency_wait", "grid_dependency_launch_dependents")
    assert any(one.startswith("tt.load") for one in rest)


@fusion
def test_attention_that_reads_nothing_ahead_waits_first():
    first, second, *rest = attend(leads=False, ahead=False)
    assert (first, second) == ("grid_dependency_launch_dependents", "grid_dependency_wait")
    assert any(one.startswith("tt.load") for one in rest)


@fusion
def test_other_attention_reads_its_schedule_and_pages_ahead_and_asks_for_keys():
    found = attend(leads=False, ahead=True)
    asked = max(at for at, one in enumerate(found) if one == "prefetch")
    assert found[0] == "grid_dependency_launch_dependents"
    assert found[asked + 1] == "grid_dependency_wait"
    ahead = [one for one in found[1:asked] if one not in ("prefetch", "scf.for")]
    assert ahead
    assert all(one.startswith("tt.load") and one.endswith("!tt.ptr<i32>") for one in ahead)
    assert "async_copy_global_to_local" in found[asked:], "the loop over keys is pipelined"
    assert found[-2:] == ["grid_dependency_wait", "tt.return"], "also where there is nothing to do"
