"""Compute matrix products in which the bits of a row do not depend on the number of rows in the product.

Every product of a weight is added up in one order: along k in steps of what tensor cores multiply at a time (16), in
the number of parts that few rows need (split-K), which are then added in their order. Few rows are computed by the
kernel of ``ops.triton.matmul``, with a program for each part. More rows are computed by the kernel below, which
computes the parts one after the other. That the two kernels agree to the bit, and with every tile, is a property of the
hardware that its documentation does not promise. ``tests/gpu/test_batch_invariance_gpu.py`` checks it on the compute
capability that ``supported`` requires.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.activation import Activation
from dovetail.ops.parts import Parts
from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.matmul import GATE_KINDS, gate, matmul, rows_of, store_rows, workspace
from dovetail.ops.triton.matmul import supported as has_kernels
from dovetail.ops.triton.sizes import cdiv
from dovetail.ops.triton.tuning import MAX_PARTS, MAX_TILES, MEASURED, ProductTile

STEP = 16
"""Tensor cores add up this many products at a time; k must be a multiple of it."""
FEW = (16, 32, 64, 128)
"""The tiles of the kernel for few rows have these numbers of rows."""
WIDE = 16384
"""A weight with at least this many rows has tiles that are twice as high."""
PROGRAMS, MOST_SPLITS = 264, 8
"""Shapes that were not measured are split until they have ``PROGRAMS`` programs, into at most ``MOST_SPLITS`` parts."""
PROCESSORS = 132
"""An H200, on which tiles were compared, has this many multiprocessors. Another number would change speed and no
bit."""
GROUP = 8
"""This many row tiles read the weight together, so that the part of the weight they read is still in the L2 cache."""


class BlockShape(NamedTuple):
    """Describe how the kernel for many rows divides a product; see ``ProductTile``."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def split_of(n: int, k: int) -> int:
    """Return the number of parts in which the products of a weight ``[n, k]`` are added up. It depends only on the
    shape. k must be a multiple of ``STEP``, and so is the length of every part."""
    measured = MEASURED.get((n, k), {}).get(16)
    if measured is not None:
        return measured.split
    wanted, block = max(1, min(MOST_SPLITS, PROGRAMS * 64 // n)), _block_k(256, k)
    return next(parts for parts in range(wanted, 0, -1) if k % (parts * block) == 0)


def tile_of(bucket: int, n: int, k: int, split: int) -> ProductTile | None:
    """Return the tile of the kernel for few rows, for up to ``bucket`` rows: the fastest on an H200. Return None if the
    parts do not fit into the workspace."""
    if split > 1 and (-(-n // 128) * 128 * bucket * split > MAX_PARTS or n > 64 * MAX_TILES):
        return None
    wide = n >= WIDE
    block_n, block_k, warps, stages = {
        16: (64, 256, 4, 3),
        32: (64, 128, 4, 4),
        64: (128, 128, 8, 4) if wide else (64, 128, 4, 3),
        128: (128, 64, 8, 6),
    }[bucket]
    return ProductTile(bucket, block_n, _block_k(block_k, k // split), warps, stages, split, early=bucket == FEW[0])


def block_of(m: int, n: int, split: int) -> BlockShape:
    """Return how products of many rows are divided: the fastest way on an H200."""
    if -(-m // 128) * -(-n // 128) < PROCESSORS:
        return BlockShape(128, 64, 4, 4)
    return BlockShape(128, 128, 8, 4) if split > 1 else BlockShape(128, 256, 8, 3)


def _block_k(most: int, span: int) -> int:
    return next(block for block in (256, 128, 64, 32, STEP) if block <= most and span % block == 0)


@triton.jit(do_not_specialize=["m"])
def _many_rows(
    x, w, bias, y, m, n, k, span,
    GATED: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    across, down = tl.cdiv(n, BLOCK_N), tl.cdiv(m, BLOCK_M)
    group = tl.program_id(0) // (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    inner = tl.program_id(0) % (GROUP * across)
    tile, block = inner // height, group * GROUP + inner % height
    rows = rows_of(tile, n, GATED, BLOCK_N)
    token = block * BLOCK_M + tl.arange(0, BLOCK_M)
    at = tl.arange(0, BLOCK_K)
    source = w + rows.to(tl.int64)[:, None] * k + at[None, :]
    tokens = x + tl.minimum(token, m - 1).to(tl.int64)[:, None] * k + at[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if SPLIT == 1:
        for start in range(0, span, BLOCK_K):
            total = tl.dot(tl.load(source + start), tl.trans(tl.load(tokens + start)), total, input_precision="ieee")
    else:
        for part in range(SPLIT):
            found = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for start in range(part * span, (part + 1) * span, BLOCK_K):
                found = tl.dot(
                    tl.load(source + start), tl.trans(tl.load(tokens + start)), found, input_precision="ieee"
                )
            total += found
    if BIAS:
        total += tl.load(bias + rows).to(tl.float32)[:, None]
    first = block.to(tl.int64) * BLOCK_M
    if GATED:
        opens, up = tl.split(tl.permute(tl.reshape(total, [BLOCK_N // 2, 2, BLOCK_M]), (0, 2, 1)))
        gated = gate(opens, up, GATED)
        store_rows(y + first * (n // 2), gated, tile, m - block * BLOCK_M, n // 2, BLOCK_M, BLOCK_N // 2)
    else:
        store_rows(y + first * n, total, tile, m - block * BLOCK_M, n, BLOCK_M, BLOCK_N)


def many_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, split: int, gated: int = False
) -> torch.Tensor:
    """Compute ``matmul.matmul`` of any number of rows, in ``split`` parts."""
    (m, k), n = x.shape, weight.shape[0]
    y = torch.empty(m, n // 2 if gated else n, dtype=x.dtype, device=x.device)
    span, block = k // split, block_of(m, n, split)
    launch(
        _many_rows, (cdiv(m, block.block_m) * cdiv(n, block.block_n),),
        x, weight, bias, y, m, n, k, span,
        GATED=gated, BIAS=bias is not None, BLOCK_M=block.block_m, BLOCK_N=block.block_n, BLOCK_K=_block_k(64, span),
        SPLIT=split, GROUP=GROUP, num_warps=block.warps, num_stages=block.stages,
    )  # fmt: skip
    return y


def supported(weight: torch.Tensor) -> bool:
    """Return True if there are invariant products of this weight."""
    return has_kernels(weight) and weight.shape[1] % STEP == 0


class InvariantRows:
    """Compute the products of one weight with any number of rows; see ``matmul.FewRows``."""

    most_rows = sys.maxsize

    def __init__(self, weight: torch.Tensor) -> None:
        n, k = weight.shape
        assert supported(weight)
        self._weight = weight.detach()
        self._space = workspace(weight.device)
        self._split = split_of(n, k)
        self._tiles = [(bucket, tile_of(bucket, n, k, self._split)) for bucket in FEW]

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute ``ops.linear.linear`` of ``x [m, k]``."""
        return self._product(x, bias, gated=False)

    def parts(self, x: torch.Tensor) -> Parts | None:
        """Return None. A norm of parts would sum in another order than a norm of whole products, and ``many_rows``
        makes only these."""
        return None

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None, activation: Activation = "silu") -> torch.Tensor:
        """Compute the gate of the product (``ops.activation.GATES``), ``[m, n / 2]``."""
        return self._product(x, bias, gated=GATE_KINDS[activation])

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None, *, gated: int) -> torch.Tensor:
        assert x.is_contiguous()
        rows = x.shape[0]
        if not rows:
            return x.new_empty(0, len(self._weight) // (2 if gated else 1))
        tile = next((tile for bucket, tile in self._tiles if rows <= bucket), None)
        if tile is None:
            return many_rows(x, self._weight, bias, self._split, gated)
        return matmul(x, self._weight, bias, tile, self._space, gated, in_order=True)
