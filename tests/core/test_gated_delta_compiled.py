"""Test that the kernels of the gated delta rule, and of short convolutions, compile for compute capability 9.0 in the sizes of Qwen3-Next and Kimi Linear,
use no more shared memory than there is, spill no registers and read none that was not written, and the last in small sizes too. That needs no GPU.

.venv/bin/python -m pytest -q tests/core/test_gated_delta_compiled.py
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton

from dovetail.ops.triton import (
    delta_chunks,
    delta_steps,
    gated_delta,
    kda_chunks,
    selective_scan,
    short_conv,
    short_conv_few,
    ssd,
)
from dovetail.ops.triton.launch import INTERPRETED
from sass import compile_source, source_of, spilled_bytes, unwritten

pytestmark = pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted, not compiled")
FLOATS = ("rate", "bias", "totals", "fades", "decays", "state")
INTEGERS = ("slots", "indptr", "fresh", "chunk_rows", "chunk_starts", "first_chunks", "saves", "starts", "counts")
HALVES = ("qkv", "a", "b", "reads", "changes", "before", "out", "x", "weight")
TYPES: dict[str, str] = {"scale": "fp32"}
TYPES |= dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(INTEGERS, "*i32") | dict.fromkeys(HALVES, "*bf16")
STEPS = {
    "_step": (delta_steps, {"BLOCK_V": 64, "TILES": 1, "PRODUCTS": False}),
    "_advance": (gated_delta, {"BLOCK_V": 32}),
}
CHUNKS = {"CHUNK": 64, "PRECISION": "tf32"}
TILES = gated_delta.TILES
BY_HEAD = {
    "solve": ({"BLOCK_V": 128, "DOUBLINGS": 5}, TILES.solve_warps, 2),
    "pass_states": (
        {"BLOCK_V": TILES.pass_columns, "WRITES": True, "SAVES": True},
        TILES.pass_warps,
        TILES.pass_stages,
    ),
    "outputs": ({"BLOCK_V": TILES.output_columns}, TILES.output_warps, 2),
}
BY_CHANNEL = {
    "solve": ({"BLOCK_V": 64, "SUB": 16, "DOUBLINGS": 5}, 8, 3),
    "pass_states": ({"BLOCK_V": 32, "WRITES": True, "SAVES": True}, 4, 2),
    "outputs": ({"BLOCK_V": 64, "SUB": 16}, 8, 3),
}
SIZES = {"GROUP": 2, "KEY": 128, "VALUE": 128, "BLOCK_K": 128}
SPILLED = 64
"""The bytes of registers that a kernel may spill: a few that are needed again at its end."""
CONVOLUTIONS = {
    "_step": (short_conv, {"BLOCK": 512, "WIDTH": 4, "SILU": True, "BIAS": False}, 4),
    "_advance": (short_conv, {"BLOCK": 256, "BEFORE": 3}, 4),
    "_chunks": (
        short_conv,
        {"BLOCK": 64, "WIDTH": 4, "SILU": True, "BIAS": False, "CHUNK": 64, "WRITES": True, "TAPS": 4, "SAVES": True},
        8,
    ),
    "step": (short_conv_few, {"BLOCK": short_conv.STEP_WORDS, "SILU": True, "BIAS": False}, 4),
    "chunks": (
        short_conv_few,
        {
            "BLOCK": 512,
            "SILU": True,
            "BIAS": False,
            "CHUNK": 64,
            "WRITES": True,
            "SAVES": True,
        },
        short_conv.WARPS,
    ),
}


def check_compiled(
    kernel: Any, constants: dict[str, Any], warps: int, stages: int, folder: Path, spilled: int = 0
) -> str:
    """Assert that a kernel fits, and return its PTX."""
    source = source_of(kernel, constants, TYPES, ("*stride", "channels", "words"))
    found = compile_source(source, warps, stages)
    assert found.metadata.shared <= 227 * 1024
    assert found.asm["ptx"].count("griddepcontrol.wait") == 1
    file = folder / "kernel.cubin"
    file.write_bytes(found.asm["cubin"])
    assert spilled_bytes(file) <= spilled, "registers are spilled"
    assert not unwritten(file)
    return found.asm["ptx"]


@pytest.mark.parametrize(
    "module", [delta_chunks, delta_steps, gated_delta, kda_chunks, selective_scan, short_conv, short_conv_few, ssd]
)
def test_no_kernel_is_compiled_anew_for_other_numbers_of_rows_and_chunks(module: ModuleType) -> None:
    """The arrays that describe rows are views of one packed copy, so that their addresses depend on these numbers."""
    kernels = [kernel for kernel in vars(module).values() if isinstance(kernel, triton.JITFunction)]
    own = [kernel for kernel in kernels if kernel.fn.__module__ == module.__name__ and "PDL" in kernel.arg_names]
    found = [each for kernel in own for each in kernel.params if each.name in INTEGERS]
    assert found
    assert all(each.do_not_specialize_on_alignment for each in found)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("by_channel", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", STEPS)
def test_decode_steps_compile_and_fit(name: str, by_channel: bool, tmp_path: Path) -> None:
    module, own = STEPS[name]
    check_compiled(getattr(module, name), SIZES | own | {"BY_CHANNEL": by_channel}, 4, 3, tmp_path)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("rows", [64, 256])
def test_decode_rows_with_states_in_bfloat16_compile_and_fit(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = delta_steps.step_tiles(rows, torch.bfloat16, products=True)
    monkeypatch.setitem(TYPES, "state", "*bf16")
    constants = SIZES | {"BLOCK_V": tiles.columns, "TILES": tiles.tiles, "BY_CHANNEL": False, "PRODUCTS": True}
    assert "wgmma.mma_async" in check_compiled(delta_steps._step, constants, tiles.warps, 3, tmp_path)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("name", ["pass_states", "outputs", pytest.param("solve", marks=pytest.mark.full)])
def test_kernels_of_prompts_compile_fit_and_use_tensor_cores(name: str, tmp_path: Path) -> None:
    own, warps, stages = BY_HEAD[name]
    ptx = check_compiled(getattr(delta_chunks, name), SIZES | CHUNKS | own, warps, stages, tmp_path, SPILLED)
    assert "wgmma.mma_async" in ptx
    assert "mma.sync" not in ptx


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(("key", "value"), [(16, 20), (32, 32), (48, 16)])
def test_kernels_of_small_prompts_compile(key: int, value: int, tmp_path: Path) -> None:
    block = triton.next_power_of_2(key)
    sizes, columns = {"GROUP": 2, "KEY": key, "VALUE": value, "BLOCK_K": block}, {"BLOCK_V": gated_delta.LEAST_COLUMNS}
    narrow = {"BLOCK_V": gated_delta._block(value, gated_delta.TILES.pass_columns)}
    for kernel, (own, warps, stages), block in (
        (delta_chunks.solve, BY_HEAD["solve"], columns),
        (delta_chunks.pass_states, BY_HEAD["pass_states"], narrow),
        (delta_chunks.outputs, BY_HEAD["outputs"], columns),
        (kda_chunks.outputs, BY_CHANNEL["outputs"], columns),
    ):
        check_compiled(kernel, sizes | CHUNKS | own | block, warps, stages, tmp_path, SPILLED)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("name", BY_CHANNEL)
def test_kernels_of_prompts_with_decays_of_channels_compile_and_fit(name: str, tmp_path: Path) -> None:
    own, warps, stages = BY_CHANNEL[name]
    check_compiled(getattr(kda_chunks, name), SIZES | CHUNKS | own, warps, stages, tmp_path, SPILLED)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_compile_and_fit(name: str, tmp_path: Path) -> None:
    module, constants, warps = CONVOLUTIONS[name]
    check_compiled(getattr(module, name), constants, warps, 3, tmp_path)
