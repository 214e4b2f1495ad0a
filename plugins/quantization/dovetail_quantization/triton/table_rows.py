"""Multiply rows with weights whose codes of 4 bits stand for numbers of a table (``dovetail_quantization.table_weights``).

Up to ``MOST_ROWS`` rows: tensor cores multiply the numbers of the table, rounded to the dtype of ``x``, as the left operand of a product (see
``integer_rows``, whose structure this kernel has), and the sums of columns that have one scale are multiplied by it. More rows:
``plain_kernel`` writes the weight in 16 bits for cuBLAS. One row has a kernel in ``table_one_row``. ``table_numbers`` looks up codes; where there is no
assembly (numbers of 32 bits, and the interpreter), codes are looked up in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.integers import PLANE, of_groups
from dovetail.ops.triton.matmul import finish_rows, rows_of
from dovetail_quantization.triton.table_numbers import bfloat16_planes, float16_planes, plane_codes


@triton.jit
def _sums(
    source, table, s0, s1, s2, s3, tokens, present, left, total,
    TEXT: tl.constexpr, GROUPS: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return ``total [BLOCK_N, BLOCK_M]`` plus the products of the four planes at ``source``, times their scales, and the columns of ``x`` at
    ``tokens``, of which ``left`` exist."""
    at = tl.arange(0, PLANE)
    if TEXT is None:
        words = source + (at // 2 * 2)[None, :]
        all_of = (at >= 0)[None, :]
        p0 = tl.load(table + plane_codes(words, all_of, 0)).to(DTYPE)
        p1 = tl.load(table + plane_codes(words, all_of, 1)).to(DTYPE)
        p2 = tl.load(table + plane_codes(words, all_of, 2)).to(DTYPE)
        p3 = tl.load(table + plane_codes(words, all_of, 3)).to(DTYPE)
    elif DTYPE.is_bf16():
        codes = tl.load(source + at[None, :], eviction_policy="evict_first")
        p0, p1, p2, p3 = bfloat16_planes(codes, TEXT)
    else:
        codes = tl.load(source + at[None, :], eviction_policy="evict_first")
        p0, p1, p2, p3 = float16_planes(codes, TEXT)
    if EVEN:
        x0 = tl.load(tokens, present, 0.0)
        x1 = tl.load(tokens + PLANE, present, 0.0)
        x2 = tl.load(tokens + 2 * PLANE, present, 0.0)
        x3 = tl.load(tokens + 3 * PLANE, present, 0.0)
    else:
        x0 = tl.load(tokens, present & (at < left)[:, None], 0.0)
        x1 = tl.load(tokens + PLANE, present & (at + PLANE < left)[:, None], 0.0)
        x2 = tl.load(tokens + 2 * PLANE, present & (at + 2 * PLANE < left)[:, None], 0.0)
        x3 = tl.load(tokens + 3 * PLANE, present & (at + 3 * PLANE < left)[:, None], 0.0)
    sums = tl.dot(p0, x0, input_precision="ieee")
    if GROUPS == 4:
        total += sums * s0[:, None]
        sums = tl.dot(p1, x1, input_precision="ieee")
    else:
        sums = tl.dot(p1, x1, sums, input_precision="ieee")
    if GROUPS >= 2:
        total += sums * s1[:, None]
        sums = tl.dot(p2, x2, input_precision="ieee")
    else:
        sums = tl.dot(p2, x2, sums, input_precision="ieee")
    if GROUPS == 4:
        total += sums * s2[:, None]
        sums = tl.dot(p3, x3, input_precision="ieee")
    else:
        sums = tl.dot(p3, x3, sums, input_precision="ieee")
    return total + sums * s3[:, None]


@triton.jit(do_not_specialize=["m"])
def few_kernel(
    x, w, scales, table, bias, y, parts, arrived, m, n, k, words, span, group,
    TEXT: tl.constexpr, GROUPS: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, IN_PARTS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply ``x [m, k]`` with codes ``w`` (int16 ``[n, words]``). A part has ``span`` columns. EVEN: all of them exist in ``x``."""
    tile, part = tl.program_id(0), tl.program_id(1)
    rows = rows_of(tile, n, GATED, BLOCK_N)
    token = tl.arange(0, BLOCK_M)
    at = tl.arange(0, PLANE)
    begin = part * span
    source = w + rows.to(tl.int64)[:, None] * tl.multiple_of(words, PLANE) + tl.multiple_of(begin // 4, PLANE)
    tokens = x + token[None, :] * k + begin + at[:, None]
    present = token[None, :] < m
    dtype: tl.constexpr = x.dtype.element_ty
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, span, BLOCK_K, num_stages=STAGES):
        for block in tl.static_range(BLOCK_K // (4 * PLANE)):
            here = start + block * (4 * PLANE)
            s0, s1, s2, s3 = of_groups(scales + rows, begin + here, group, n, GROUPS)
            total = _sums(
                source + here // 4, table, s0, s1, s2, s3, tokens + here, present, k - begin - here, total,
                TEXT, GROUPS, EVEN, dtype,
            )  # fmt: skip
    finish_rows(total, y, bias, parts, arrived, rows, tile, part, m, n, GATED, BIAS, BLOCK_M, BLOCK_N, SPLIT, IN_PARTS)


@triton.jit
def _store_plane(numbers, scales, out, rows, inside, column, across, k, group, EVEN: tl.constexpr) -> None:
    scale = tl.load(scales + column // group * across + rows, inside, 0.0)
    at = column + tl.arange(0, PLANE)
    present = inside[:, None] if EVEN else inside[:, None] & (at < k)[None, :]
    found = (numbers.to(tl.float32) * scale[:, None]).to(out.dtype.element_ty)
    tl.store(out + rows.to(tl.int64)[:, None] * k + at[None, :], found, present)


@triton.jit
def plain_kernel(
    w, scales, table, out, n, k, words, across, group,
    TEXT: tl.constexpr, EVEN: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Write the weight ``[n, k]`` in the dtype of ``out``. With a TEXT, the numbers of the table are rounded to float16 first. Scales of
    two blocks are ``across`` numbers apart. A program
    writes a block of planes of each row."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, PLANE)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    begin = tl.program_id(1) * (4 * PLANE)
    there = row < n
    source = w + row.to(tl.int64)[:, None] * tl.multiple_of(words, PLANE) + tl.multiple_of(begin // 4, PLANE)
    if TEXT is None:
        pairs = source + (at // 2 * 2)[None, :]
        p0 = tl.load(table + plane_codes(pairs, there[:, None], 0))
        p1 = tl.load(table + plane_codes(pairs, there[:, None], 1))
        p2 = tl.load(table + plane_codes(pairs, there[:, None], 2))
        p3 = tl.load(table + plane_codes(pairs, there[:, None], 3))
    else:
        codes = tl.load(source + at[None, :], there[:, None], 0, eviction_policy="evict_first")
        p0, p1, p2, p3 = float16_planes(codes, TEXT)
    _store_plane(p0, scales, out, row, there, begin, across, k, group, EVEN)
    _store_plane(p1, scales, out, row, there, begin + PLANE, across, k, group, EVEN)
    _store_plane(p2, scales, out, row, there, begin + 2 * PLANE, across, k, group, EVEN)
    _store_plane(p3, scales, out, row, there, begin + 3 * PLANE, across, k, group, EVEN)
