"""Dequantize MXFP4 codes in registers.

An E2M1 number has the sign, the exponent and the mantissa in the order of a wider floating-point number; shifted to the end of its
exponent, it is a number that is too small by a power of two (the number 0.5 is subnormal in both). Multiplication by the scale of
its block, which is a power of two too, makes up for that, as far as the range of the dtype allows; what remains is a constant
factor (``unscaled``). Nothing is rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl

HALF = tl.constexpr(16)
"""Half of the columns of a block that has one scale."""


def _place_pair(result: str, pair: str, at: int, mantissa: int) -> str:
    """Return assembly that makes two 16-bit numbers of the codes at bits ``at`` of both halves of the register
    ``pair``. ``mantissa`` is the bit of the wider number's mantissa that stands for a half."""
    shift, mask = mantissa - at, 7 << mantissa
    if mantissa + 4 <= 12:  # one multiplication shifts a code to both places, which do not overlap
        return f"""
        and.b32 t, {pair}, {(15 << at) * 0x10001:#x};
        mul.lo.u32 t, t, {1 << shift | 1 << 12 - at:#x};
        and.b32 {result}, t, {(0x8000 | mask) * 0x10001:#x};"""
    return f"""
        shl.b32 t, {pair}, {shift};
        and.b32 t, t, {mask * 0x10001:#x};
        shl.b32 q, {pair}, {12 - at};
        lop3.b32 {result}, q, 0x80008000, t, 0xEA;"""


def _assembly(at: int, mantissa: int) -> tl.constexpr:
    """Return assembly that makes four 16-bit numbers of the codes at bits ``at`` of four bytes."""
    return tl.constexpr(f"""{{
        .reg .b32 u, v, t, q;
        prmt.b32 u, $2, 0, 0x4140;
        prmt.b32 v, $2, 0, 0x4342;
        {_place_pair("$0", "u", at, mantissa)}
        {_place_pair("$1", "v", at, mantissa)}
        }}""")


_LOW_BF16, _HIGH_BF16 = _assembly(0, 6), _assembly(4, 6)
_LOW_FP16, _HIGH_FP16 = _assembly(0, 9), _assembly(4, 9)


def _plane_assembly(plane: int, mantissa: int) -> tl.constexpr:
    """Return assembly that makes two 16-bit numbers of the codes at bits ``4 * plane`` of two words of 16 bits."""
    return tl.constexpr(f"""{{
        .reg .b32 u, t, q;
        shr.b32 u, $1, {plane // 2 * 8};
        {_place_pair("$0", "u", plane % 2 * 4, mantissa)}
        }}""")


_P0_BF16, _P1_BF16, _P2_BF16, _P3_BF16 = (_plane_assembly(plane, 6) for plane in range(4))
_P0_FP16, _P1_FP16, _P2_FP16, _P3_FP16 = (_plane_assembly(plane, 9) for plane in range(4))


@triton.jit
def scale_factors(scales, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, HALF_K: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return the second argument of ``dequantized_codes`` for ``scales [HALF_K / 16, BLOCK_N]``."""
    return word_factors(scales, DTYPE, BLOCK_N, HALF_K, HALF, ASSEMBLY)


@triton.jit
def word_factors(
    scales, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, ASSEMBLY: tl.constexpr
):
    """Return the second argument of ``plane_of_words`` for ``scales [WORDS / GROUP, BLOCK_N]``, each of GROUP words."""
    if ASSEMBLY and DTYPE.is_bf16():
        factor = ((scales.to(tl.uint16) + 63) << 7).to(tl.bfloat16, bitcast=True)
    elif ASSEMBLY:
        factor = ((scales.to(tl.uint32) + 14) << 23).to(tl.float32, bitcast=True).to(tl.float16)
    else:
        added: tl.constexpr = 126 if DTYPE.is_fp16() else 63
        factor = ((scales.to(tl.uint32) + added) << 23).to(tl.float32, bitcast=True)
    whole = tl.broadcast_to(tl.trans(factor)[:, :, None], [BLOCK_N, WORDS // GROUP, GROUP])
    return tl.reshape(whole, [BLOCK_N, WORDS])


@triton.jit
def dequantized_codes(codes, factors, HIGH: tl.constexpr, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return the weights in the low or high bits of ``codes``, times 2 ** -63 unless DTYPE is float16. With ASSEMBLY two
    codes are shifted at once, to 16-bit numbers, otherwise one to a float32 number."""
    if ASSEMBLY:
        # a branch for each type: the assembly's dtype may not be a parameter
        if DTYPE.is_bf16():
            text: tl.constexpr = _HIGH_BF16 if HIGH else _LOW_BF16
            numbers = tl.inline_asm_elementwise(text, "=&r,=&r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
        else:
            text: tl.constexpr = _HIGH_FP16 if HIGH else _LOW_FP16
            numbers = tl.inline_asm_elementwise(text, "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    else:
        code = codes.to(tl.uint32) >> (4 if HIGH else 0)
        numbers = (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True)
    return (numbers * factors).to(DTYPE)


@triton.jit
def plane_of_words(words, factors, PLANE: tl.constexpr, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return the weights at bits ``4 * PLANE`` of words of 16 bits, as ``dequantized_codes`` does. DTYPE has 16 bits if ASSEMBLY."""
    if ASSEMBLY:
        if DTYPE.is_bf16():
            text: tl.constexpr = (_P0_BF16, _P1_BF16, _P2_BF16, _P3_BF16)[PLANE]
            numbers = tl.inline_asm_elementwise(text, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
        else:
            text: tl.constexpr = (_P0_FP16, _P1_FP16, _P2_FP16, _P3_FP16)[PLANE]
            numbers = tl.inline_asm_elementwise(text, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    else:
        code = words.to(tl.uint32) >> (4 * PLANE)
        numbers = (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True)
    return (numbers * factors).to(DTYPE)


@triton.jit
def unscaled(total, DTYPE: tl.constexpr):
    """Return sums of products with what ``dequantized_codes`` returns as sums of products with weights."""
    if DTYPE.is_fp16():
        return total
    return total * 9223372036854775808.0
