"""Compute products of 33 to 512 rows and a weight of 4-bit integers in planes (``dovetail.ops.integers``).

The rows of the weight are the left operand, which warp groups take from registers: codes go from shared memory to the registers of tensor
cores without another layout. The four planes of a block are joined to one operand of 128 columns, whose products are started one after
another without a wait between them. One warp group computes a tile, and two programs share a multiprocessor: one dequantizes while tensor
cores work for the other. Two warp groups in one program, which wait for each other in each block, were slower.

Where registers hold them next to the sums of all blocks, the sums of a block are multiplied by its scales. In larger tiles, and if a
block has several scales, the numbers are multiplied instead, in the dtype of ``x``.

All programs of the same rows of the weight are started next to each other, so that the L2 cache has the codes for all but the first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.integers import PLANES, Integers
from dovetail.ops.triton.integers import PLANE, of_groups, planes_of, planes_with_groups
from dovetail.ops.triton.launch import INTERPRETED, launch
from dovetail.ops.triton.matmul import Workspace, finish_rows, rows_of
from dovetail.ops.triton.sizes import cdiv
from dovetail.ops.triton.tuning import MAX_PARTS

_PLAIN = tl.constexpr(INTERPRETED)  # the interpreter has no assembly
FEWEST_MANY = 33
"""From this number of rows of 16 bits on the kernel is used."""
MOST_MANY = 512
"""Up to this number of rows the kernel is used for weights of one scale in 128 columns without zero points. More are multiplied faster by
cuBLAS, although the weight is dequantized first."""
MOST_MANY_GROUPS = 256
"""That number for weights with more scales or with zero points. Their shared memory would allow one program of the largest tile only."""
_PROGRAMS = 264
"""The programs that an H200 runs at the same time, two on each multiprocessor."""
_WIDE = 16384
"""From this number of rows of the weight on there are enough tiles of twice as many rows."""


class ManyTile(NamedTuple):
    """Describe how a product is divided into tiles of ``block_m`` rows of ``x`` and ``block_n`` rows of the weight. ``split`` programs
    share the columns of a tile."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    split: int


def many_tile(rows: int, n: int, k: int, *, one_scale: bool) -> ManyTile:
    """Return the tile for ``rows`` rows and a weight ``[n, k]``: the fastest for the sizes of an 8B model on an H200. ``one_scale`` says that 128 columns of
    a row have one scale and no zero points."""
    wide = n >= _WIDE
    if rows <= 64:
        size = (64, 128 if wide else 64, 4, 4)
    else:
        size = (128, 128 if one_scale and (wide or rows > MOST_MANY_GROUPS) else 64, 4, 3)
    block_m, block_n = size[:2]
    tiles = -(-n // block_n) * -(-rows // block_m)
    split = max(1, min(8, _PROGRAMS // tiles, k // PLANES, MAX_PARTS // (tiles * block_m * block_n)))
    return ManyTile(*size, split)


def scales_sums(tile: ManyTile, groups: int) -> bool:
    """Return True if the sums of a block are multiplied by scales, not its numbers. ``groups`` is ``planes_with_groups``."""
    return groups == 1 and tile.block_m * tile.block_n <= 64 * 128


@triton.jit
def _joined(p0, p1, p2, p3):
    """Return planes ``[rows, PLANE]`` in the order of their columns, ``[rows, 4 * PLANE]``."""
    planes = tl.join(tl.join(p0, p2), tl.join(p1, p3))
    return tl.reshape(tl.permute(planes, (0, 2, 3, 1)), [p0.shape[0], 4 * PLANE])


@triton.jit
def _times(plane, scale, DTYPE: tl.constexpr):
    return plane * scale.to(DTYPE)[:, None]


@triton.jit
def _ended(total):
    """Return ``total``, the result of products of warp groups, when they have ended. Without this, Triton 3.6 lets products that take
    their left operand from registers run on into the next round, which may overwrite these registers."""
    if _PLAIN:
        return total
    else:
        return tl.inline_asm_elementwise("", "=r,0", [total], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit(do_not_specialize=["m", "heights"])
def many_plane_rows(
    x, w, scales, zeros, bias, y, parts, arrived, m, n, k, heights, group: tl.constexpr,
    GROUPS: tl.constexpr, ZEROS: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, IN_PARTS: tl.constexpr, SCALE_SUMS: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply ``x [m, k]`` with codes ``w`` (int16 ``[n, k / 4]``) in planes. ``scales`` and ``zeros`` are float32 ``[groups, n]``."""
    tile, height, part = tl.program_id(0) // heights, tl.program_id(0) % heights, tl.program_id(1)
    rows = rows_of(tile, n, GATED, BLOCK_N)
    before = height * BLOCK_M
    token = before + tl.arange(0, BLOCK_M)
    present = (token < m)[None, :]
    words = tl.multiple_of(k // 4, PLANE)
    source = w + rows.to(tl.int64)[:, None] * words + tl.arange(0, PLANE)[None, :]
    tokens = token[None, :] * k + tl.arange(0, 4 * PLANE)[:, None]
    blocks = k // (4 * PLANE)
    dtype: tl.constexpr = x.dtype.element_ty
    m0 = tl.full([BLOCK_N], 8.0, tl.float32)
    m1, m2, m3 = m0, m0, m0
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for block in tl.range(part * blocks // SPLIT, (part + 1) * blocks // SPLIT, num_stages=STAGES):
        start = block * (4 * PLANE)
        s0, s1, s2, s3 = of_groups(scales + rows, start, group, n, GROUPS)
        if ZEROS:
            m0, m1, m2, m3 = of_groups(zeros + rows, start, group, n, GROUPS)
        codes = tl.load(source + block * PLANE, eviction_policy="evict_first")
        right = tl.load(x + start + tokens, present, 0.0)
        p0, p1, p2, p3 = planes_of(codes, m0[:, None], m1[:, None], m2[:, None], m3[:, None], dtype, False)
        if SCALE_SUMS:
            total += tl.dot(_joined(p0, p1, p2, p3), right) * s0[:, None]
        else:
            p0, p1, p2, p3 = _times(p0, s0, dtype), _times(p1, s1, dtype), _times(p2, s2, dtype), _times(p3, s3, dtype)
            total = _ended(tl.dot(_joined(p0, p1, p2, p3), right, total))
    place = y + before.to(tl.int64) * (n // 2 if GATED else n)
    if IN_PARTS:
        place += (part * before).to(tl.int64) * n
    first = height * tl.cdiv(n, BLOCK_N)
    finish_rows(
        total, place, bias, parts + first.to(tl.int64) * (SPLIT * BLOCK_N * BLOCK_M), arrived + first, rows, tile, part, m - before, n,
        GATED, BIAS, BLOCK_M, BLOCK_N, SPLIT, IN_PARTS,
    )  # fmt: skip


def multiply_many(
    x: torch.Tensor, weight: Integers, bias: torch.Tensor | None, y: torch.Tensor, gated: int, tile: ManyTile, space: Workspace,
    *, in_parts: bool,
) -> None:  # fmt: skip
    """Write the product of ``x [m, k]`` (16 bits) and a weight ``[n, k]`` whose scales and zero points are float32 to ``y``: ``[m, n]``, ``[m, n / 2]`` if
    ``gated`` (see ``GATE_KINDS``), or float32 ``[split, m, n]`` if ``in_parts``. Mutates ``y`` and ``space``."""
    (m, k), n = x.shape, len(weight.codes)
    heights, groups = cdiv(m, tile.block_m), planes_with_groups(k, weight.group)
    launch(
        many_plane_rows, (cdiv(n, tile.block_n) * heights, tile.split),
        x, weight.codes.view(torch.int16), weight.scales, weight.zeros, bias, y, space.parts, space.arrived,
        m, n, k, heights, weight.group,
        GROUPS=groups, ZEROS=weight.zeros is not None, GATED=gated, BIAS=bias is not None,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, SPLIT=tile.split, IN_PARTS=in_parts, SCALE_SUMS=scales_sums(tile, groups),
        STAGES=tile.stages,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
