"""Test the kernel of MXFP4 experts as it is compiled for compute capability 9.0, and the assembly in it. That needs no GPU.

.venv/bin/python -m pytest -q tests/core/test_mxfp4_compiled.py
"""

from __future__ import annotations

import itertools
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from dovetail.ops.mxfp4 import VALUES
from dovetail.ops.triton import mxfp4, mxfp4_numbers, mxfp4_words
from dovetail.ops.triton.launch import INTERPRETED
from dovetail.ops.triton.mxfp4_tiles import tiles_of
from sass import compile_source, source_of, spilled_bytes, unwritten

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted, not compiled"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]
SIZES = (32, 4, 2880, 2880)
POINTERS = dict.fromkeys(("x", "added", "bias", "out"), "*bf16") | dict.fromkeys(("w", "scale"), "*u8")
POINTERS |= dict.fromkeys(("order", "blocks", "used"), "*i32") | {"weights": "*fp32"}
NUMBERS = dict.fromkeys(("tiles", "tokens", "first", "experts"), "i32") | dict.fromkeys(
    ("alpha", "limit", "offset"), "fp32"
)


@pytest.mark.parametrize(
    ("tokens", "gated"),
    [
        (1, True),
        (64, False),
        *(
            pytest.param(tokens, gated, marks=pytest.mark.full)
            for tokens in (1, 64, 128, 256, 4096)
            for gated in (0, 1)
        ),
    ],
)
def test_tiles_of_gpt_oss_compile(tokens: int, gated: bool, tmp_path: Path) -> None:
    check(tokens, tmp_path / "kernel.cubin", gated=gated)


@pytest.mark.parametrize(
    "tokens", [64, *(pytest.param(tokens, marks=pytest.mark.full) for tokens in (1, 96, 128, 256, 4096))]
)
def test_gate_and_up_with_adapters_compile(tokens: int, tmp_path: Path) -> None:
    """One token is sorted like several."""
    check(tokens, tmp_path / "kernel.cubin", gated=True, adapted=True)


def check(tokens: int, cubin: Path, *, gated: bool, adapted: bool = False) -> None:
    """Check that few registers are spilled, and that everything that the loop multiplies is copied to shared memory ahead."""
    tiles = tiles_of(tokens, *SIZES, 1.0, 2)
    tile = tiles.gate_up if gated else tiles.down
    constants: dict[str, Any] = {
        "GATED": bool(gated), "ADDED": adapted, "TOP_K": 4, "SCALED": False, "BIAS": True, "LIMITED": True, "IN_PARTS": not gated,
        "ONE": tokens == 1 and not adapted, "BLOCK_M": tiles.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
        "EVEN": False, "ASSEMBLY": True,
    }  # fmt: skip
    constants |= {} if adapted else {"added": None}
    kernel = mxfp4._product
    types = POINTERS | {"out": "*bf16" if gated else "*fp32"} | NUMBERS
    code = compile_source(source_of(kernel, constants, types, ("half", "width")), tile.warps, tile.stages).asm
    body = code["ttgir"].split("scf.for", 1)[1].split("scf.yield", 1)[0]
    assert body.count("async_copy_global_to_local") == 4, "codes, scales and both halves of x"
    assert "tt.load" not in body
    cubin.write_bytes(code["cubin"])
    assert spilled_bytes(cubin) <= 256, (
        "registers are spilled: 200 bytes are, in the tile that is the fastest on an H200"
    )
    assert not adapted or not unwritten(cubin)


@pytest.mark.parametrize("gated", [True, pytest.param(False, marks=pytest.mark.full)])
def test_products_of_words_compile(gated: bool, tmp_path: Path) -> None:
    """Everything that the loops multiply is copied to shared memory ahead, codes go from there to the registers of tensor cores, and products
    end before their registers are overwritten."""
    tile = mxfp4_words.GATE_UP if gated else mxfp4_words.DOWN
    constants: dict[str, Any] = {
        "GATED": gated, "TOP_K": 4, "SCALED": False, "BIAS": True, "LIMITED": True, "IN_PARTS": not gated,
        "BLOCK_N": tile.block_n, "STAGES": tile.stages,
    }  # fmt: skip
    kernel = mxfp4_words._product
    types = POINTERS | {"w": "*i16", "out": "*bf16" if gated else "*fp32"} | NUMBERS
    found = compile_source(source_of(kernel, constants, types, ("k", "width")), tile.warps, tile.stages, tile.registers)
    bodies = [loop.split("scf.yield", 1)[0] for loop in found.asm["ttgir"].split("scf.for")[1:]]
    assert len(bodies) == 3, "one loop for blocks of up to 16, 32 and 64 pairs each"
    for body in bodies:
        assert body.count("async_copy_global_to_local") == 3, "codes, scales and x"
        assert "tt.load" not in body
        assert "ttg.local_store" not in body, "the numbers of the weight go through shared memory"
    waits = re.findall(r"wgmma.wait_group.sync.aligned (\d+);", found.asm["ptx"])
    assert waits == ["0"] * 3, "products of a chunk wait for each other, or run on when their registers are overwritten"
    assert (found.metadata.shared + 1024) * 3 <= 228 << 10, "three programs do not fit a multiprocessor"
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(found.asm["cubin"])
    assert spilled_bytes(cubin) <= 160, "registers are spilled"
    assert not unwritten(cubin)


def run(assembly: str, word: int) -> tuple[int, int]:
    """Return what ``assembly`` writes to ``$0`` and ``$1``, or 0, if ``$2`` is ``word``."""
    registers = {"$1": 0, "$2": word}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for operation, given in re.findall(r"(prmt|shl|shr|and|lop3|mul)\.(?:b32|lo\.u32) ([^;]+);", assembly):
        to, *names = (name.strip() for name in given.split(","))
        a, b, *more = map(value, names)
        if operation == "prmt":
            (selector,), source = more, (b << 32 | a).to_bytes(8, "little")
            found = sum(source[selector >> 4 * i & 7] << 8 * i for i in range(4))
        elif operation == "lop3":
            c, table = more
            assert table == 0xEA
            found = a & b | c
        elif operation in ("shl", "shr"):
            found = a << b if operation == "shl" else a >> b
        else:
            found = a & b if operation == "and" else a * b
        registers[to] = found & 0xFFFFFFFF
    return registers["$0"], registers["$1"]


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_the_assembly_widens_every_code_of_words(name: str) -> None:
    """Two numbers are made of two words of 16 bits, of the codes in one of four planes."""
    values = [*VALUES, *(-value for value in VALUES)]
    for plane in range(4):
        text = getattr(mxfp4_numbers, f"_P{plane}_{name.upper()}").value.replace("$1", "$2")
        for codes in itertools.product(range(16), range(16)):
            words = [(0x9C35 + 0x3A7 * plane) & ~(15 << 4 * plane) & 0xFFFF | code << 4 * plane for code in codes]
            got = run(text, words[0] | words[1] << 16)[0]
            assert numbers_of(got, name) == [values[code] for code in codes]


def numbers_of(word: int, name: str) -> list[float]:
    """Return the two numbers in a register, divided by the smallest normal number of their type."""
    bits = [word >> shift & 0xFFFF for shift in (0, 16)]
    if name == "bf16":
        return [struct.unpack("<f", struct.pack("<I", one << 16))[0] * 2.0**126 for one in bits]
    return [struct.unpack("<e", struct.pack("<H", one))[0] * 2.0**14 for one in bits]


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_the_assembly_widens_every_code(name: str) -> None:
    """Four numbers are made of four bytes, in their order: those in the low or the high bits, times the smallest normal
    number of the type."""
    kind = name.upper()
    halves = [getattr(mxfp4_numbers, f"_{half}_{kind}") for half in ("LOW", "HIGH")]
    values = [*VALUES, *(-value for value in VALUES)]
    for first in range(256):
        given = [(first + 71 * i) % 256 for i in range(4)]
        for high, text in enumerate(halves):
            words = run(text.value, int.from_bytes(given, "little"))
            got = [number for word in words for number in numbers_of(word, name)]
            assert got == [values[byte >> 4 * high & 15] for byte in given]
