"""Compute products of up to 32 rows and a weight of 4-bit integers in planes (``dovetail.ops.integers``).

The rows of ``x`` are the left operand, and those of the weight the columns of the right one. Then each warp takes columns of its own from
registers, and all warps share the block of ``x``: a program may compute many rows of the weight, and reads ``x``, which is as large as
the codes of 16 rows, from the L2 cache less often. With the weight as the left operand, programs of four warps would use products of
warp groups, which wait for each other at every plane.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.integers import PLANE, of_groups, planes_of
from dovetail.ops.triton.launch import prefetch
from dovetail.ops.triton.matmul import finish_rows, rows_of

LINE = tl.constexpr(64)
"""The words of 16 bits in a line of 128 bytes."""


@triton.jit
def _column_sums(
    x0, x1, x2, x3, codes, s0, s1, s2, s3, m0, m1, m2, m3, total, GROUPS: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Return ``total [BLOCK_M, BLOCK_N]`` plus the products of the columns of ``x`` (``[BLOCK_M, PLANE]``) and of the planes of ``codes``
    (int16 ``[PLANE, BLOCK_N]``), times their scales. See ``of_groups`` for scales and middles."""
    p0, p1, p2, p3 = planes_of(codes, m0[None, :], m1[None, :], m2[None, :], m3[None, :], DTYPE, False)
    nothing = tl.zeros(total.shape, tl.float32)
    sums = tl.dot(x0, p0, input_precision="ieee")
    if GROUPS == 4:
        total += sums * s0[None, :]
        sums = nothing
    sums = tl.dot(x1, p1, sums, input_precision="ieee")
    if GROUPS >= 2:
        total += sums * s1[None, :]
        sums = nothing
    sums = tl.dot(x2, p2, sums, input_precision="ieee")
    if GROUPS == 4:
        total += sums * s2[None, :]
        sums = nothing
    sums = tl.dot(x3, p3, sums, input_precision="ieee")
    return total + sums * s3[None, :]


@triton.jit(do_not_specialize=["m"])
def plane_columns(
    x, w, scales, zeros, bias, y, parts, arrived, m, n, k, span, group: tl.constexpr,
    GROUPS: tl.constexpr, ZEROS: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, IN_PARTS: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply with codes ``w`` (int16 ``[n, k / 4]``) in planes, like ``integer_rows._few_plane_rows``. Before it waits for the previous
    kernel, a program fetches the first AHEAD lines (a power of two, or 0) of its rows of the weight to the L2 cache."""
    tile, part = tl.program_id(0), tl.program_id(1)
    rows = rows_of(tile, n, GATED, BLOCK_N)
    token = tl.arange(0, BLOCK_M)
    at = tl.arange(0, PLANE)
    begin = part * span
    words = tl.multiple_of(k // 4, PLANE)
    own = w + rows.to(tl.int64) * words + tl.multiple_of(begin // 4, PLANE)
    source = own[None, :] + at[:, None]
    tokens = x + token[:, None] * k + begin + at[None, :]
    present = token[:, None] < m
    dtype: tl.constexpr = x.dtype.element_ty
    m0 = tl.full([BLOCK_N], 8.0, tl.float32)
    m1, m2, m3 = m0, m0, m0
    if PDL:
        gdc_launch_dependents()
        if AHEAD:
            line = tl.minimum(tl.arange(0, AHEAD) * LINE, span // 4 - 1)
            prefetch(own[:, None] + line[None, :])
        gdc_wait()
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, span, BLOCK_K, num_stages=STAGES):
        for block in tl.static_range(BLOCK_K // (4 * PLANE)):
            here = start + block * (4 * PLANE)
            s0, s1, s2, s3 = of_groups(scales + rows, begin + here, group, n, GROUPS)
            if ZEROS:
                m0, m1, m2, m3 = of_groups(zeros + rows, begin + here, group, n, GROUPS)
            codes = tl.load(source + here // 4, eviction_policy="evict_first")
            x0 = tl.load(tokens + here, present, 0.0)
            x1 = tl.load(tokens + here + PLANE, present, 0.0)
            x2 = tl.load(tokens + here + 2 * PLANE, present, 0.0)
            x3 = tl.load(tokens + here + 3 * PLANE, present, 0.0)
            total = _column_sums(x0, x1, x2, x3, codes, s0, s1, s2, s3, m0, m1, m2, m3, total, GROUPS, dtype)
    finish_rows(
        tl.trans(total), y, bias, parts, arrived, rows, tile, part, m, n, GATED, BIAS, BLOCK_M, BLOCK_N, SPLIT, IN_PARTS
    )
