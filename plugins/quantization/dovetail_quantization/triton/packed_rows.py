"""Multiply rows with weights in packed blocks of GGUF (``dovetail.ops.packed_blocks``).

One row: tensor cores would be idle for seven of eight rows, and converting each code takes longer than reading it. Therefore the
row is rounded to integers of 16 bits with a scale for each unit, which is finer than bfloat16 by a factor of 64, and each
is divided into two bytes. Instructions that add up four products of bytes (dp4a) multiply both with the codes as they are stored, and
sums of a unit are exact. A program rounds its part of the row once, and then computes one tile of the weight after another.

Up to ``MOST_ROWS`` rows: tensor cores multiply dequantized tiles, which are the left operand of the product in registers (see
``dovetail.ops.triton.matmul``, whose structure this kernel has). The integers become floating-point numbers by their bits: 4
bits at the end of the mantissa of 16.0 are 16 and their number. Weights are rounded to the dtype of ``x``.

More rows: ``ops.triton.packed_plain`` writes the weight in 16 bits for cuBLAS.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.launch import INTERPRETED
from dovetail.ops.triton.matmul import finish_row, finish_rows, rows_of
from dovetail.ops.triton.packed_numbers import (
    code_number,
    factors_of,
    product_of,
    spread,
    stored_factors,
)

PART_COLUMNS = 2048
"""One row is divided into parts of this number of columns, if it is divided."""
_PLAIN = tl.constexpr(INTERPRETED)  # the interpreter has no assembly
_PART = tl.constexpr(PART_COLUMNS)


@triton.jit(do_not_specialize=["m"])
def few_rows_kernel(
    x, w, scale, multiplier, offset, offset_multiplier, bias, y, parts, arrived, m, n, k, span, words, stride,
    BITS: tl.constexpr, STEP: tl.constexpr, ZERO: tl.constexpr, WHOLE: tl.constexpr, GROUP: tl.constexpr,
    OFFSET: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, IN_PARTS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply up to BLOCK_M rows ``x [m, k]``. ``words`` are the words of a row of the weight, ``span`` the columns of a part.
    EVEN: all columns of all parts exist."""
    tile, part = tl.program_id(0), tl.program_id(1)
    each: tl.constexpr = 32 // BITS
    unit: tl.constexpr = STEP * each
    units: tl.constexpr = BLOCK_K // unit
    rows = rows_of(tile, n, GATED, BLOCK_N)
    wide = rows.to(tl.int64)
    token = tl.arange(0, BLOCK_M)
    at = tl.arange(0, BLOCK_K // each)
    column = at // STEP * unit + at % STEP  # that of the first code of each word
    begin = part * span
    source = w + wide[:, None] * words + begin // each + at[None, :]
    tokens = x + token[:, None] * k + begin + column[None, :]
    present = token[:, None] < m
    dtype: tl.constexpr = x.dtype.element_ty
    middle: tl.constexpr = ZERO + (16 if BITS == 4 else 256)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, span, BLOCK_K):
        if EVEN:
            codes = tl.load(source + start // each, eviction_policy="evict_first")
        else:
            inside = (begin + start + column < k)[None, :]
            codes = tl.load(source + start // each, inside, 0, eviction_policy="evict_first")
        factor = factors_of(scale, multiplier, wide, words, begin + start, k, unit, WHOLE, GROUP, BLOCK_K, BLOCK_K)
        less = factor * middle
        if OFFSET:
            less += factors_of(
                offset, offset_multiplier, wide, words, begin + start, k, unit, WHOLE, GROUP, BLOCK_K, BLOCK_K
            )
        factor = spread(factor, BLOCK_N, units, STEP)
        less = spread(less, BLOCK_N, units, STEP)
        for index in tl.static_range(each):
            left = (code_number(codes, index, BITS) * factor - less).to(dtype)
            if EVEN:
                right = tl.load(tokens + start + index * STEP, present, 0.0)
            else:
                right = tl.load(tokens + start + index * STEP, present & inside, 0.0)
            total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    finish_rows(
        total, y, bias, parts, arrived, rows, tile, part, m, n, GATED, BIAS, BLOCK_M, BLOCK_N, SPLIT, IN_PARTS, stride
    )


@triton.jit
def rounded(numbers, inverse):
    """Return integers of 16 bits as their high bytes, which are signed, and what these lack, -128 to 127."""
    whole = tl.floor(numbers * inverse + 0.5).to(tl.int32)
    high = (whole + 128) >> 8
    return high, whole - (high << 8)


@triton.jit
def byte_sums(codes, numbers, total):
    """Return ``total`` plus the sum of the products of the four bytes of ``codes``, unsigned, and of ``numbers``, signed."""
    if _PLAIN:
        for byte in tl.static_range(4):
            signed = ((numbers >> (8 * byte) & 255) ^ 128) - 128
            total += (codes >> (8 * byte) & 255) * signed
        return total
    return tl.inline_asm_elementwise(
        "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [codes, numbers, total], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _packed_row(x, k, inverse, HALF: tl.constexpr, BITS: tl.constexpr, STEP: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the high bytes and the low bytes of four rounded numbers of ``x`` in each word: those that belong to the codes in
    the low bits (HALF 0) or the high bits (HALF 1) of the bytes of a word. The third result is their sum."""
    each: tl.constexpr = 32 // BITS
    at = tl.arange(0, BLOCK_K // each)
    column = at // STEP * (STEP * each) + at % STEP
    high = tl.zeros([BLOCK_K // each], tl.int32)
    low = tl.zeros([BLOCK_K // each], tl.int32)
    whole = tl.zeros([BLOCK_K // each], tl.int32)
    for byte in tl.static_range(4):
        place = column + STEP * (byte * (each // 4) + HALF)
        first, second = rounded(tl.load(x + place, place < k, 0.0).to(tl.float32), inverse)
        whole += first * 256 + second
        high |= (first & 255) << (8 * byte)
        low |= (second & 255) << (8 * byte)
    return high, low, whole


@triton.jit(do_not_specialize=["tiles"])
def one_row_kernel(
    x, w, scale, multiplier, offset, offset_multiplier, bias, y, n, k, span, words, tiles,
    BITS: tl.constexpr, STEP: tl.constexpr, ZERO: tl.constexpr, WHOLE: tl.constexpr, GROUP: tl.constexpr,
    OFFSET: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply one row ``x [k]``. ``words`` are the words of a row of the weight. A part has ``span`` columns, at most BLOCK_K; if there are
    several, ``y`` is ``[parts, n]``."""
    index, programs, part = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    each: tl.constexpr = 32 // BITS
    unit: tl.constexpr = STEP * each
    units: tl.constexpr = BLOCK_K // unit
    at = tl.arange(0, BLOCK_K // each)
    begin = tl.multiple_of(part * span, _PART)
    end = begin + span
    inside = (at < tl.multiple_of(span // each, 4))[None, :]
    w += begin // each
    x += begin
    y += part * n
    rows = rows_of(index, n, GATED, BLOCK_N).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
    codes = tl.load(w + rows[:, None] * words + at[None, :], inside, 0, eviction_policy="evict_first")
    factor, factor_times = stored_factors(
        scale, multiplier, rows, words, begin, end, unit, WHOLE, GROUP, BLOCK_K, _PART
    )
    less, less_times = factor, factor_times
    if OFFSET:
        less, less_times = stored_factors(
            offset, offset_multiplier, rows, words, begin, end, unit, WHOLE, GROUP, BLOCK_K, _PART
        )
    if PDL:
        gdc_wait()
    column = at // STEP * unit + at % STEP
    largest = tl.zeros([BLOCK_K // each], tl.float32)
    for number in tl.static_range(each):
        place = column + number * STEP
        largest = tl.maximum(largest, tl.abs(tl.load(x + place, place < span, 0.0).to(tl.float32)))
    most = tl.maximum(tl.max(tl.reshape(largest, [units, STEP]), 1), 1e-30)
    # 32512 = 127 * 256: the high byte of a rounded number is signed
    inverse = tl.reshape(tl.broadcast_to((32512.0 / most)[:, None], [units, STEP]), [BLOCK_K // each])
    high, low, whole = _packed_row(x, span, inverse, 0, BITS, STEP, BLOCK_K)
    if BITS == 4:
        high_after, low_after, more = _packed_row(x, span, inverse, 1, BITS, STEP, BLOCK_K)
        whole += more
    whole = tl.sum(tl.reshape(whole, [units, STEP]), 1)
    most *= 1.0 / 32512.0
    of_x = whole.to(tl.float32) * most
    for tile in range(index, tiles, programs):
        following = rows_of(tile + programs, n, GATED, BLOCK_N).to(tl.int64)
        more_tiles = tile + programs < tiles
        ahead = (at < tl.multiple_of(tl.where(more_tiles, span // each, 0), 4))[None, :]
        last = tl.where(more_tiles, end, begin)
        codes_ahead = tl.load(w + following[:, None] * words + at[None, :], ahead, 0, eviction_policy="evict_first")
        # These are not multiplied here, which would wait for them.
        factor_ahead, factor_times_ahead = stored_factors(
            scale, multiplier, following, words, begin, last, unit, WHOLE, GROUP, BLOCK_K, _PART
        )
        less_ahead, less_times_ahead = factor_ahead, factor_times_ahead
        if OFFSET:
            less_ahead, less_times_ahead = stored_factors(
                offset, offset_multiplier, following, words, begin, last, unit, WHOLE, GROUP, BLOCK_K, _PART
            )
        first = tl.zeros([BLOCK_N, BLOCK_K // each], tl.int32)
        second = tl.zeros([BLOCK_N, BLOCK_K // each], tl.int32)
        if BITS == 4:
            first = byte_sums(codes & 0x0F0F0F0F, high[None, :], first)
            second = byte_sums(codes & 0x0F0F0F0F, low[None, :], second)
            first = byte_sums(codes >> 4 & 0x0F0F0F0F, high_after[None, :], first)
            second = byte_sums(codes >> 4 & 0x0F0F0F0F, low_after[None, :], second)
        else:
            first = byte_sums(codes, high[None, :], first)
            second = byte_sums(codes, low[None, :], second)
        sums = tl.sum(tl.reshape(first * 256 + second, [BLOCK_N, units, STEP]), 2)
        total = (
            (sums - (whole * ZERO)[None, :]).to(tl.float32) * most[None, :] * product_of(factor, factor_times, GROUP)
        )
        if OFFSET:
            total -= of_x[None, :] * product_of(less, less_times, GROUP)
        finish_row(y, bias, rows, total, tile, n, GATED, BIAS, BLOCK_N)
        codes, factor, less, rows = codes_ahead, factor_ahead, less_ahead, following
        factor_times, less_times = factor_times_ahead, less_times_ahead
