"""Test the kernels of weights whose codes stand for numbers of a table: that they compile for compute capability 9.0, spill no registers and look
up codes where they are multiplied, and that their assembly looks up the numbers. That needs no GPU.

Run: python -m pytest tests/core/test_table_compiled.py
"""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.ops.triton.launch import INTERPRETED
from dovetail_quantization.bnb_tensors import TABLES
from dovetail_quantization.triton import table_numbers
from dovetail_quantization.triton.table_one_row import one_row_kernel
from dovetail_quantization.triton.table_rows import few_kernel, plain_kernel
from dovetail_quantization.triton.table_tiles import few_rows_tile, one_row_tile
from sass import source_of, without_spills

compiles = pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted, not compiled")
POINTERS = {
    "x": "*bf16",
    "w": "*i16",
    "scales": "*fp32",
    "table": "*fp32",
    "whole": "*i32",
    "look_up": "*i32",
    "factor": "fp32",
}
POINTERS |= {"bias": "*bf16", "y": "*bf16", "out": "*bf16", "parts": "*fp32", "arrived": "*i32"}
TEXT = table_numbers.pairs_assembly(TABLES["nf4"], torch.bfloat16)
NONE = {"GATED": 0, "bias": None, "BIAS": False}


def compiled(kernel: Any, constants: dict[str, Any], warps: int, stages: int, file: Path, **types: str) -> Any:
    """Return the code of a kernel that spills no registers. Arguments without a type are integers."""
    source = source_of(kernel, constants, POINTERS | types, ("n", "k", "span", "words", "across", "group"))
    return without_spills(source, file, warps, stages, enable_fp_fusion=True)


@compiles
@pytest.mark.parametrize("gated", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("rows", [16, *(pytest.param(rows, marks=pytest.mark.full) for rows in (1, 32, 64, 128))])
def test_products_of_few_rows_look_up_codes_in_the_registers_of_the_product(
    rows: int, gated: int, tmp_path: Path
) -> None:
    tile = few_rows_tile(rows, 4096, 4096)
    constants = NONE | {"GATED": gated, "TEXT": TEXT, "GROUPS": 2, "EVEN": True, "SPLIT": tile.split, "IN_PARTS": False}
    constants |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "STAGES": tile.stages}
    code = compiled(few_kernel, constants, tile.warps, tile.stages, tmp_path / "kernel.cubin")
    lines = [line for line in code["ttgir"].splitlines() if "elementwise_inline_asm" in line]
    assert lines
    for line in lines:  # adjacent codes are in one register, as the assembly needs
        assert "dot_op<{opIdx = 0" in line
        assert "kWidth = 2" in line
    assert "cp.async" in code["ptx"]


@compiles
def test_one_row_and_weights_compile(tmp_path: Path) -> None:
    tile = one_row_tile(4096, 4096)
    assert tile is not None
    constants = NONE | {"BFLOAT16": True, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    compiled(one_row_kernel, constants, tile.warps, 3, tmp_path / "kernel.cubin", x="*i32", w="*i32")
    constants = {"TEXT": TEXT, "EVEN": True, "BLOCK_N": 64}
    code = compiled(plain_kernel, constants, 4, 3, tmp_path / "kernel.cubin")
    assert "st.global.v4" in code["ptx"]


def permuted(a: int, b: int, selector: int) -> int:
    """Return what ``prmt.b32`` returns (PTX ISA)."""
    both, result = a | b << 32, 0
    for index in range(4):
        chosen = selector >> 4 * index & 15
        byte = both >> 8 * (chosen & 7) & 255
        result |= (byte if chosen < 8 else 255 * (byte >> 7)) << 8 * index
    return result


def executed(text: str, registers: dict[str, int]) -> list[int]:
    """Execute assembly and return its four results."""
    held = dict(registers)
    for line in text.strip("{} \n").split(";"):
        name, *rest = line.replace(",", " ").split() or [".reg"]
        if name == ".reg":
            continue
        a, b, *more = [held[one] if one in held else int(one, 0) % 2**32 for one in rest[1:]]
        if name == "prmt.b32":
            held[rest[0]] = permuted(a, b, *more)
        elif name == "lop3.b32":
            assert rest[-1] == "0xea"
            held[rest[0]] = a & b | more[0]
        else:
            held[rest[0]] = {"and.b32": a & b, "shr.u32": a >> b % 32}[name]
    return [held[f"${index}"] for index in range(4)]


@pytest.mark.parametrize("kind", TABLES)
def test_assembly_looks_up_the_numbers_of_the_codes(kind: str) -> None:
    table = TABLES[kind]
    whole, factor = table_numbers.whole_numbers(table)
    assert [number * factor for number in whole] == pytest.approx(table, abs=2e-5)
    held = {f"${5 + index}": word % 2**32 for index, word in enumerate(table_numbers.byte_words(table))}
    for _ in range(20):
        word = random.getrandbits(32)
        codes = [word >> 4 * index & 15 for index in range(8)]
        for dtype in (torch.bfloat16, torch.float16):
            found = struct.pack("<4I", *executed(table_numbers.pairs_assembly(table, dtype), {"$4": word}))
            numbers = torch.frombuffer(bytearray(found), dtype=dtype)
            assert numbers.equal(torch.tensor(table)[codes].to(dtype))
        high, low, high_after, low_after = executed(table_numbers.BYTES.value, {"$4": word} | held)
        high, low = (struct.unpack("<8b", struct.pack("<2I", *two)) for two in ((high, high_after), (low, low_after)))
        assert [a * 256 + b for a, b in zip(high, low, strict=True)] == [whole[code] for code in codes]
