"""Compute products of few rows with weights in FP8 (E4M3), in about the time to read the weight once.

Tensor cores multiply the FP8 numbers as they are, with the weight as the left operand (see ``dovetail.ops.triton.matmul``,
whose structure this kernel has). The rows are quantized already, or they have 16 bits: then the kernel divides them into two
FP8 parts, a number and what it lacks, times 16. Both have the scale of the row in a block of columns, a power of two. The
two parts together are as exact as bfloat16, and quantizing needs no other kernel; but each program divides all rows, which
pays up to ``SPLIT_ROWS`` rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.interfaces.quantization import LinearInput, QuantizedActivations
from dovetail.ops.activation import Activation
from dovetail.ops.triton.launch import INTERPRETED, launch
from dovetail.ops.triton.matmul import GATE_KINDS, around, finish_rows, rows_of, wait, workspace
from dovetail.ops.triton.sizes import cdiv
from dovetail.ops.triton.tuning import MAX_PARTS, MAX_TILES

SPLIT_ROWS = 16
"""Up to this number of rows the kernel divides 16-bit rows into two parts."""
MOST_ROWS = 64
"""Up to this number of rows the kernel is faster than cuBLAS (measured on an H200)."""
BLOCK = 128
"""The rows and columns of a block that has one scale."""
_BLOCK = tl.constexpr(BLOCK)
_MIXED = tl.constexpr(INTERPRETED)  # the interpreter multiplies in float32, and does not round to FP8 correctly


class FewRowsTile(NamedTuple):
    """Describe how a product is divided into tiles, see ``ops.triton.tuning.ProductTile``."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    split: int
    early: bool


def tile_of(rows: int, n: int, k: int, *, quantized: bool, blocks: bool) -> FewRowsTile:
    """Return the tile for ``rows`` rows and a weight ``[n, k]``: the fastest for the matrices of an 8B model on an H200,
    or one like them."""
    block_m = next(size for size in (16, 32, 64) if rows <= size)
    if n >= 16384 and not blocks and k % 256 == 0:
        return FewRowsTile(block_m, 128, 256, 8, 3, 1, early=not quantized)
    wide = not quantized and not blocks and k % 256 == 0
    block_k, stages = (256, 3) if wide else (128, 6 if quantized else 4)
    tiles = -(-n // 64)
    split = 1
    while split < 4 and k % (2 * split * block_k) == 0 and tiles * split * (2 if quantized else 1) < 264:
        split *= 2
    if split > 1 and (tiles * split * 64 * block_m > MAX_PARTS or tiles > MAX_TILES):
        split = 1
    return FewRowsTile(block_m, 64, block_k, 4, stages, split, early=not quantized)


@triton.jit
def _two_parts(rows):
    """Return FP8 tensors and a scale such that ``(first + second / 16) * scale[:, None]`` is about ``rows``."""
    numbers = rows.to(tl.float32)
    power = tl.max(tl.abs(numbers), 1).to(tl.int32, bitcast=True) & 0x7F800000
    power = tl.maximum(power, 25 << 23) - (7 << 23)  # the largest number becomes one of 128 to 256
    inverse = ((254 << 23) - power).to(tl.float32, bitcast=True)
    numbers *= inverse[:, None]
    first = numbers.to(tl.float8e4nv)
    second = ((numbers - first.to(tl.float32)) * 16.0).to(tl.float8e4nv)
    return first, second, power.to(tl.float32, bitcast=True)


@triton.jit
def _multiply(
    total, left, right, weight_scale, row_scale, rows, token, m, k, at,
    QUANTIZED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return ``total`` plus the product of a tile of the weight and a tile of the rows, which begin at column ``at``."""
    if _MIXED:
        found = tl.dot(left.to(tl.float32), tl.trans(right.to(tl.float32)), input_precision="ieee")
    elif QUANTIZED:
        found = tl.dot(left, tl.trans(right)) if BLOCKS else tl.dot(left, tl.trans(right), total)
    else:
        first, second, scale = _two_parts(right)
        found = tl.dot(left, tl.trans(second)) * 0.0625
        found = tl.dot(left, tl.trans(first), found) * scale[None, :]
    if BLOCKS:
        found *= tl.load(weight_scale + rows // _BLOCK * (k // _BLOCK) + at // _BLOCK)[:, None]
        if QUANTIZED:
            found *= tl.load(row_scale + token * (k // _BLOCK) + at // _BLOCK, token < m, 0.0)[None, :]
    if QUANTIZED and not BLOCKS and not _MIXED:
        return found
    return total + found


@triton.jit(do_not_specialize=["m"])
def _few_rows(
    x, row_scale, w, weight_scale, bias, y, parts, arrived, m, n, k, span,
    GATED: tl.constexpr, BIAS: tl.constexpr, QUANTIZED: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, EARLY: tl.constexpr, IN_PARTS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    tile, part = tl.program_id(0), tl.program_id(1)
    rows = rows_of(tile, n, GATED, BLOCK_N)
    token = tl.arange(0, BLOCK_M)
    at = tl.arange(0, BLOCK_K)
    begin = part * span
    source = w + rows.to(tl.int64)[:, None] * k + begin + at[None, :]
    tokens = x + token[:, None] * k + begin + at[None, :]
    present = token[:, None] < m
    if PDL:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if EARLY:
        first = tl.multiple_of(tile * BLOCK_K % span, BLOCK_K)
        right = tl.zeros([BLOCK_M, BLOCK_K], x.dtype.element_ty)
        for start in range(0, span, BLOCK_K):
            if start == 0:  # waits inside the loop; the pipeline's first loads of ``left`` come before the loop
                if PDL:
                    wait()
                right = tl.load(tokens + first, present, 0.0)
            more = token[:, None] < tl.where(start + BLOCK_K < span, m, 0)
            following = tl.load(tokens + around(start + BLOCK_K, first, span, BLOCK_K), more, 0.0)
            here = around(start, first, span, BLOCK_K)
            left = tl.load(source + here, eviction_policy="evict_first")
            total = _multiply(
                total, left, right, weight_scale, row_scale, rows, token, m, k, begin + here, QUANTIZED, BLOCKS
            )
            right = following
    else:
        for start in range(0, span, BLOCK_K):
            left = tl.load(source + start, eviction_policy="evict_first")
            right = tl.load(tokens + start, present, 0.0)
            total = _multiply(
                total, left, right, weight_scale, row_scale, rows, token, m, k, begin + start, QUANTIZED, BLOCKS
            )
    if not BLOCKS:
        total *= tl.load(weight_scale + rows)[:, None]
        if QUANTIZED:
            total *= tl.load(row_scale + token, token < m, 0.0)[None, :]
    finish_rows(total, y, bias, parts, arrived, rows, tile, part, m, n, GATED, BIAS, BLOCK_M, BLOCK_N, SPLIT, IN_PARTS)


class Fp8Rows:
    """Multiply rows with one weight ``[n, k]`` in FP8. ``scale`` is float32 ``[n]``, or ``[n / 128, k / 128]`` (rounded up)
    for blocks. Rows are tensors of 16 bits, at most ``SPLIT_ROWS``, or quantized, at most ``MOST_ROWS``, with scales
    ``[rows, 1]``, or ``[rows, k / 128]`` if the weight has blocks."""

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        self._weight, self._scale = weight, scale
        self._blocks = scale.dim() == 2
        self._space = workspace(weight.device)
        self._tiles = {
            quantized: [
                None,
                *(
                    tile_of(rows, *weight.shape, quantized=quantized, blocks=self._blocks)
                    for rows in range(1, (MOST_ROWS if quantized else SPLIT_ROWS) + 1)
                ),
            ]
            for quantized in (False, True)
        }

    def forward(self, x: LinearInput, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute ``LinearProduct.forward``."""
        return self._compute(x, bias)

    def gated(self, x: LinearInput, bias: torch.Tensor | None, activation: Activation) -> torch.Tensor:
        """Compute ``LinearProduct.gated``."""
        return self._compute(x, bias, GATE_KINDS[activation])

    def parts(self, x: LinearInput) -> torch.Tensor | None:
        """Compute ``LinearProduct.parts``."""
        tile = self._tiles[isinstance(x, QuantizedActivations)][x.shape[0]]
        return None if tile is None or tile.split == 1 else self._compute(x, None, in_parts=True)

    def _compute(
        self,
        x: LinearInput,
        bias: torch.Tensor | None,
        gated: int = False,
        *,
        in_parts: bool = False,
    ) -> torch.Tensor:
        rows, scales, dtype = x if isinstance(x, QuantizedActivations) else (x, None, x.dtype)
        assert rows.is_contiguous()
        (m, k), n = rows.shape, self._weight.shape[0]
        tile = self._tiles[scales is not None][m]
        assert tile is not None
        if in_parts:
            y = torch.empty(tile.split, m, n, dtype=torch.float32, device=rows.device)
        else:
            y = torch.empty(m, n // 2 if gated else n, dtype=dtype, device=rows.device)
        launch(
            _few_rows, (cdiv(n, tile.block_n), tile.split),
            rows, scales, self._weight, self._scale, bias, y, self._space.parts, self._space.arrived,
            m, n, k, k // tile.split,
            GATED=gated, BIAS=bias is not None, QUANTIZED=scales is not None, BLOCKS=self._blocks,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
            SPLIT=tile.split, EARLY=tile.early, IN_PARTS=in_parts, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return y


def few_rows(weight: torch.Tensor, scale: torch.Tensor) -> Fp8Rows | None:
    """Return the products of ``weight [n, k]`` with few rows, or None if its sizes, its blocks or the device have none."""
    (n, k), blocks = weight.shape, tuple(-(-size // BLOCK) for size in weight.shape)
    fits = (
        weight.dtype is torch.float8_e4m3fn
        and weight.is_contiguous()
        and scale.is_contiguous()
        and scale.dtype is torch.float32
        and n > 0
        and k % BLOCK == 0
        and scale.shape in ((n,), blocks)
        and (INTERPRETED or torch.cuda.get_device_capability(weight.device) == (9, 0))
    )
    return Fp8Rows(weight, scale) if fits else None
