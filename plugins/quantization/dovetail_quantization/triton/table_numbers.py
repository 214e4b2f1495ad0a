"""Look up codes of 4 bits in a table of 16 numbers, in registers.

An instruction that permutes bytes (``prmt``) chooses four of eight bytes by four codes of 3 bits at once. Two of them choose from both halves of
a table of 16 bytes, and a third chooses between the results by the codes' fourth bits. Numbers of 16 bits have two such tables, of
their high and of their low bytes: 21 instructions look up eight codes. A load from memory for each code takes far longer.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from dovetail.ops.triton.integers import PLANE
from dovetail.ops.triton.launch import INTERPRETED

_PLAIN = tl.constexpr(INTERPRETED)  # the interpreter has no assembly
LARGEST = 32512
"""The largest whole number of 16 bits whose high byte, rounded, is at most 127."""


def _chosen(result: str, words: Sequence[str]) -> str:
    """Return assembly that looks up four codes, of which ``c`` has three bits of each and ``s`` the fourth, in a table of four ``words``."""
    a, b, c, d = words
    return f"""
        prmt.b32 u, {a}, {b}, c;
        prmt.b32 v, {c}, {d}, c;
        prmt.b32 {result}, u, v, s;"""


_BEGIN = """{ .reg .b32 c, s, u, v, h, l;
        and.b32 c, $4, 0x77777777;
        shr.u32 s, $4, 1;
        lop3.b32 s, s, 0x44444444, 0x32103210, 0xea;"""
_NEXT = """
        shr.u32 c, c, 16;
        shr.u32 s, s, 16;"""
BYTES = tl.constexpr(
    _BEGIN
    + _chosen("$0", ("$5", "$6", "$7", "$8"))
    + _chosen("$1", ("$9", "$10", "$11", "$12"))
    + _NEXT
    + _chosen("$2", ("$5", "$6", "$7", "$8"))
    + _chosen("$3", ("$9", "$10", "$11", "$12"))
    + " }"
)
"""Assembly that looks up the bytes of ``byte_words`` for the eight codes of ``$4``."""


def pairs_assembly(table: Sequence[float], dtype: torch.dtype) -> str:
    """Return assembly that makes eight numbers of 16 bits, two in a register, of the eight codes of ``$4``. The tables are constants: with
    arguments for them, the compiler would write the numbers to shared memory before it multiplies them."""
    numbers = torch.tensor(table).to(dtype).view(torch.int16).tolist()
    words = [str(word) for word in _table_words([number >> 8 for number in numbers], numbers)]
    look_up = _chosen("h", words[:4]) + _chosen("l", words[4:])

    def pairs(first: int) -> str:
        return f"""
        prmt.b32 ${first}, l, h, 0x5140;
        prmt.b32 ${first + 1}, l, h, 0x7362;"""

    return _BEGIN + look_up + pairs(0) + _NEXT + look_up + pairs(2) + " }"


def _table_words(high: Sequence[int], low: Sequence[int]) -> list[int]:
    """Return the high and the low bytes of 16 numbers as words, which are signed."""
    return list(struct.unpack("<8i", bytes(number & 255 for number in (*high, *low))))


def whole_numbers(table: Sequence[float]) -> tuple[list[int], float]:
    """Return the numbers of a table as whole numbers up to ``LARGEST``, and the factor that makes them those of the table again."""
    factor = max(abs(number) for number in table) / LARGEST
    return [round(number / factor) for number in table], factor


def byte_words(table: Sequence[float]) -> list[int]:
    """Return the words of ``whole_numbers``, for ``word_bytes``: their high bytes, which are signed, and what these lack."""
    whole, _ = whole_numbers(table)
    high = [number + 128 >> 8 for number in whole]
    return _table_words(high, [number - (more << 8) for number, more in zip(whole, high, strict=True)])


@triton.jit
def read_words(words):
    """Return eight words. That they are read, instead of being constants, keeps them in registers."""
    return (
        tl.load(words), tl.load(words + 1), tl.load(words + 2), tl.load(words + 3),
        tl.load(words + 4), tl.load(words + 5), tl.load(words + 6), tl.load(words + 7),
    )  # fmt: skip


@triton.jit
def plane_codes(source, inside, PLANE_INDEX: tl.constexpr):
    """Return the codes of a plane, one for each place. ``source`` points to the first 16 bits of the word of each."""
    at = tl.arange(0, PLANE)[None, :]
    found = tl.load(source + PLANE_INDEX // 2, inside, 0).to(tl.int32)
    return found >> 4 * (2 * (PLANE_INDEX % 2) + at % 2) & 15


@triton.jit
def bfloat16_planes(codes, TEXT: tl.constexpr):
    """Return the numbers of four planes of ``codes`` (int16 ``[rows, PLANE]``). Adjacent codes have to be in one register: they share
    a word."""
    return tl.inline_asm_elementwise(
        TEXT, "=&r,=&r,=&r,=&r,r", [codes],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def float16_planes(codes, TEXT: tl.constexpr):
    """See ``bfloat16_planes``."""
    return tl.inline_asm_elementwise(
        TEXT, "=&r,=&r,=&r,=&r,r", [codes],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def signed_sums(codes, numbers, total):
    """Return ``total`` plus the sums of the products of four signed bytes."""
    if _PLAIN:
        for byte in tl.static_range(4):
            total += (((codes >> 8 * byte & 255) ^ 128) - 128) * (((numbers >> 8 * byte & 255) ^ 128) - 128)
        return total
    return tl.inline_asm_elementwise(
        "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [codes, numbers, total], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _bytes_in_memory(words, whole, FIRST: tl.constexpr):
    """Return what ``word_bytes`` returns for four codes from bit FIRST on, looked up in memory."""
    high = tl.zeros(words.shape, tl.int32)
    low = tl.zeros(words.shape, tl.int32)
    for index in tl.static_range(4):
        number = tl.load(whole + (words >> FIRST + 4 * index & 15))
        more = (number + 128) >> 8
        high |= (more & 255) << 8 * index
        low |= (number - (more << 8) & 255) << 8 * index
    return high, low


@triton.jit
def word_bytes(codes, words, whole):
    """Return the bytes of the numbers that the eight codes of each of ``codes`` stand for: the high bytes and the low bytes of the first four,
    then of the others. They are looked up in eight ``words``, or in the ``whole`` numbers where there is no assembly."""
    if _PLAIN:
        high, low = _bytes_in_memory(codes, whole, 0)
        high_after, low_after = _bytes_in_memory(codes, whole, 16)
        return high, low, high_after, low_after
    else:
        return tl.inline_asm_elementwise(
            BYTES, "=&r,=&r,=&r,=&r,r" + ",r" * 8,
            [codes, words[0], words[1], words[2], words[3], words[4], words[5], words[6], words[7]],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
