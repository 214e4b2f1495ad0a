"""Test the kernels of latent attention as they are compiled for compute capability 9.0, with the sizes of DeepSeek. That needs no GPU.

.venv/bin/python -m pytest -q tests/core/test_latent_compiled.py
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.backends import nvidia as backends

from dovetail.ops.triton.launch import INTERPRETED
from dovetail_attention.triton import expanded, latent, merge, tiles
from sass import compile_source, source_of

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted, not compiled"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]
SHARED_MEMORY = 227 << 10
FULL = pytest.mark.full
POINTERS = dict.fromkeys(("q", "out"), "*bf16") | dict.fromkeys(("partial", "lse"), "*fp32") | {"tree": "*u8"}
POINTERS |= dict.fromkeys(("records", "count", "span_starts", "table"), "*i32")


def compiled(
    tile: tiles.AttentionTile,
    group: int,
    *,
    tree: bool = False,
    chunk: int = 0,
    pool: str = "*bf16",
    leads: bool = False,
    scaled: bool = False,
) -> Any:
    """Return the kernel for decode rows, or for trees or fixed chunks."""
    kernel = latent._latent
    constants: dict[str, Any] = {
        "PAGE": 16, "VALUE_DIM": 512, "BLOCK_V": 512, "REST": 64, "BLOCK_REST": 64, "TOKEN": 576, "SCALED": scaled, "GROUP": group,
        "ROWS": tile.rows, "KEYS": tile.keys, "FLIP": tile.flip, "HALVES": tile.halves and not chunk, "ALONE": tile.resident == 1,
        "CAUSAL": True, "TREE": tree, "CHUNK": chunk, "RECORD": 8,
        "FEWER": True, "LEVEL": not tree and not chunk, "LEADS": leads, "AHEAD": not chunk and not leads, "PDL": True,
    }  # fmt: skip
    fusion = {"enable_fp_fusion": False} if chunk else {}
    return compile_kernel(kernel, constants, {"kv": pool, "scales": "*bf16" if scaled else pool}, tile, **fusion)


def compile_kernel(
    kernel: Any, constants: dict[str, Any], types: dict[str, str], tile: tiles.AttentionTile, **options: bool
) -> Any:
    """Compile a kernel whose arguments have the alignment that they have on a device."""
    types, single = POINTERS | {"scale": "fp32"} | types, ("table", "tree", "firsts")
    source = source_of(kernel, constants, types, ("[qkv]_token", "[qkv]_head"), single)
    return compile_source(source, tile.num_warps, tile.num_stages, tile.registers, **options)


def spilled(found: Any, folder: Path) -> int:
    """Return the bytes of registers that a compiled kernel spills."""
    (folder / "kernel.cubin").write_bytes(found.asm["cubin"])
    usage = [Path(backends.__file__).parent / "bin" / "cuobjdump", "-res-usage", folder / "kernel.cubin"]
    reported = subprocess.run(usage, capture_output=True, text=True, check=True).stdout
    stack = re.search(r"STACK:(\d+)", reported)
    assert stack is not None
    return int(stack[1])


@pytest.mark.parametrize(
    ("heads", "form", "pool"),
    [
        (16, "decode", "*bf16"),
        (16, "few", "*bf16"),
        (128, "decode", "*bf16"),
        *(pytest.param(heads, form, "*bf16", marks=FULL) for heads in (16, 32, 128) for form in ("trees", "chunks")),
        *(
            pytest.param(heads, form, "*fp8e4nv", marks=FULL)
            for heads in (16, 128)
            for form in ("decode", "chunks", "scales")
        ),
    ],
)
def test_tiles_compile(heads: int, form: str, pool: str, tmp_path: Path) -> None:
    """Latents are copied to shared memory ahead and stay there for both products, and few registers are spilled."""
    in_pool = torch.bfloat16 if pool == "*bf16" else torch.float8_e4m3fn
    tile = tiles.choose_latent(
        heads, torch.bfloat16, in_pool, large_memory=True, two=form == "chunks", few=form == "few"
    )
    found = compiled(
        tile, heads, tree=form == "trees", chunk=256 * (form == "chunks"), pool=pool, scaled=form == "scales"
    )
    assert found.metadata.shared <= SHARED_MEMORY
    text = found.asm["ttgir"]
    if pool == "*bf16":
        body = re.split(r"scf\.for", text)[-1].split("scf.yield", 1)[0]
        dots = "warp_group_dot " if tile.flip or tile.rows == 64 else "tt.dot "  # Hopper's take 64 rows at a time
        halves = tile.halves and form != "chunks"
        assert body.count(dots) == (5 if halves else 3), "both parts of the keys, and the values"
        assert body.count("async_copy_global_to_local") >= (3 if halves else 2)
        blocks = re.findall(rf"memdesc<(\d+)x\d+x{256 if halves else 512}xbf16", text)
        assert int(blocks[0]) >= 2, "blocks of latents in shared memory"
    assert spilled(found, tmp_path) <= 1024, "what is spilled is computed before the loop and read in it"


@pytest.mark.parametrize("sizes", [merge.FEW_SIZES, merge.MANY_SIZES], ids=str)
def test_merges_of_long_values_compile(sizes: tuple[int, int, int, int], tmp_path: Path) -> None:
    """Partial results are read 16 bytes at a time, and no register is spilled."""
    constants = {
        "HEADS": 16, "DIM": 512, "SHARE": sizes[0], "BLOCK": sizes[1], "PARTS": sizes[2], "MORE": sizes[3], "TOKEN": 4, "SHARED": False,
        "PDL": True,
    }  # fmt: skip
    types: dict[str, str] = dict.fromkeys(("own", "own_lse", "shared", "shared_lse"), "*fp32")
    types |= dict.fromkeys(("own_tokens", "shared_tokens"), "*i32")
    tile = tiles.AttentionTile(16, 16, 4, 3, 1)
    found = compile_kernel(merge._merge_long, constants, types, tile)
    assert len(re.findall(r"ld\.global\S*\.v4", found.asm["ptx"])) >= 8
    assert spilled(found, tmp_path) == 0


@pytest.mark.parametrize("rows", [128, pytest.param(64, marks=FULL)])
def test_tiles_of_expanded_prompts_compile(rows: int, tmp_path: Path) -> None:
    """Both products are those of Hopper, and no register is spilled."""
    tile = tiles.EXPANDED_TILES[rows]
    constants = {
        "HEADS": 16, "KEY_DIM": 128, "BLOCK_K": 128, "REST": 64, "BLOCK_REST": 64, "VALUE_DIM": 128, "BLOCK_V": 128,
        "ROWS": tile.rows, "KEYS": tile.keys, "RECORD": 8, "LEADS": False, "PDL": True,
    }  # fmt: skip
    types = dict.fromkeys(("k", "v"), "*bf16") | {"firsts": "*i32"}
    found = compile_kernel(expanded._expanded, constants, types, tile)
    assert found.metadata.shared <= SHARED_MEMORY
    body = re.split(r"scf\.for", found.asm["ttgir"])[-1].split("scf.yield", 1)[0]
    assert body.count("warp_group_dot ") == body.count("async_copy_global_to_local") == 3
    assert spilled(found, tmp_path) == 0


@pytest.mark.parametrize("leads", [False, pytest.param(True, marks=FULL)])
def test_only_schedules_and_page_numbers_are_read_early(leads: bool) -> None:
    """What is read before the previous kernel has ended (see ``ops/triton/launch.py``): nothing by the first kernel after
    a schedule is made, and otherwise what a leader has completed."""
    text = compiled(tiles.LATENT_TILES[16], 16, leads=leads).asm["ttgir"]
    kinds = r"grid_dependency_\w+|prefetch|tt\.load .*?: .*?!tt\.ptr<\w+>|async_copy_global_to_local|tt\.store"
    found = re.findall(kinds, text)
    if leads:
        assert found[:2] == ["grid_dependency_wait", "grid_dependency_launch_dependents"]
        return
    waits = found.index("grid_dependency_wait")
    assert found[0] == "grid_dependency_launch_dependents"
    assert "prefetch" in found[1:waits]
    assert all(one == "prefetch" or one.endswith("!tt.ptr<i32>") for one in found[1:waits])
    assert found[-1] == "grid_dependency_wait", "also where there is nothing to do"
