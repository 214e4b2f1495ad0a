"""Launch the kernels of ``packed_rows`` for one weight."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dovetail.ops.activation import Activation
from dovetail.ops.packed_blocks import PackedType, PackedWeight
from dovetail.ops.triton import packed_plain
from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.matmul import GATE_KINDS, workspace
from dovetail.ops.triton.sizes import cdiv, next_power_of_2
from dovetail.ops.triton.tuning import MAX_PARTS, MAX_TILES
from dovetail_quantization.triton.one_row import OneRowTile, parts_of
from dovetail_quantization.triton.packed_rows import few_rows_kernel, one_row_kernel

MOST_ROWS = 64
"""Up to this number of rows the kernels of few rows are used."""


class PackedTile(NamedTuple):
    """Describe how a product of several rows is divided, see ``ops.triton.tuning.ProductTile``. A part has ``span`` columns."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    split: int
    span: int


def one_row_tile(k: int, packing: PackedType, *, in_parts: bool = False) -> OneRowTile | None:
    """Return the tile of one row and a weight of ``k`` columns, or None if there is none. ``in_parts``: it divides the columns. Of the tiles
    that ``benchmarks/gguf_gpu.py`` tries, those of one part are the fastest for the sizes of an 8B model on an H200."""
    split = parts_of(k, in_parts=in_parts)
    if split is None:
        return None
    block_k = max(next_power_of_2(k // split), 64)
    if packing.bits == 8 and block_k > 8192:
        return OneRowTile(4, block_k, 32, 1, split)
    warps = max(1, min(16, block_k // 1024))
    return OneRowTile(4, block_k, warps, max(1, 16 // warps), split)


def few_rows_tile(rows: int, n: int, k: int, packing: PackedType) -> PackedTile:
    """Return the tile of ``rows`` rows and a weight ``[n, k]``. Not measured yet."""
    block_m = next(size for size in (16, 32, 64) if rows <= size)
    block_k = 256 if packing.bits == 4 else 128
    if k < block_k:
        block_k //= 2
    tiles, blocks, split = -(-n // 64), -(-k // block_k), 1
    while split < 8 and 2 * split <= blocks and tiles * split < 264:
        split *= 2
    if split > 1 and (tiles * split * 64 * block_m > MAX_PARTS or tiles > MAX_TILES):
        split = 1
    return PackedTile(block_m, 64, block_k, 4, 3, split, -(-blocks // split) * block_k)


class PackedRows:
    """Multiply up to ``MOST_ROWS`` rows with one weight ``[n, k]``, or write it in 16 bits. ``one_row`` is the tile of one row of 16
    bits, ``one_row_in_parts`` that with which its product stays in parts, and ``few_rows`` those of all numbers of rows."""

    def __init__(self, weight: PackedWeight) -> None:
        self._weight, self._packing = weight, weight.packing
        self.shape = n, k = len(weight.rows), weight.columns
        self._words = weight.rows.stride(0) // 4
        self._sections = [
            weight.section(name) for name in ("codes", "scale", "multiplier", "offset", "offset_multiplier")
        ]
        packing = self._packing
        self._constants: dict[str, Any] = {
            "BITS": packing.bits, "STEP": packing.step, "ZERO": packing.zero, "WHOLE": packing.whole,
            "GROUP": packing.group or 0, "OFFSET": packing.offset,
        }  # fmt: skip
        self._space = workspace(weight.rows.device)
        self.one_row = one_row_tile(k, packing)
        self.one_row_in_parts = one_row_tile(k, packing, in_parts=True)
        self.few_rows = [few_rows_tile(max(rows, 1), n, k, packing) for rows in range(MOST_ROWS + 1)]

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor, activation: Activation | None = None
    ) -> None:
        """Write the product of contiguous ``x [m, k]`` and the weight to ``y [m, n]``, whose rows need not be adjacent. With
        an ``activation``, write its gate, ``[m, n / 2]``."""
        gated = 0 if activation is None else int(GATE_KINDS[activation])
        if (tile := self._tile_of_one(x)) is not None:
            self._multiply_one(x, bias, y, gated, tile)
        else:
            self._multiply_few(x, bias, y, gated, in_parts=False)

    def parts(self, x: torch.Tensor) -> torch.Tensor | None:
        """Compute ``LinearProduct.parts``."""
        if self._tile_of_one(x) is not None:
            if (one := self.one_row_in_parts) is None:
                return None
            y = torch.empty(one.split, 1, self.shape[0], dtype=torch.float32, device=x.device)
            self._multiply_one(x, None, y, 0, one)
            return y
        tile = self.few_rows[len(x)]
        if tile.split == 1:
            return None
        y = torch.empty(tile.split, len(x), self.shape[0], dtype=torch.float32, device=x.device)
        self._multiply_few(x, None, y, 0, in_parts=True)
        return y

    def _tile_of_one(self, x: torch.Tensor) -> OneRowTile | None:
        """Return the tile of one row if ``x`` is one, of 16 bits: the kernel rounds more than float32 does."""
        return self.one_row if len(x) == 1 and x.dtype is not torch.float32 else None

    def _multiply_one(
        self, x: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor, gated: int, tile: OneRowTile
    ) -> None:
        n, k = self.shape
        launch(
            one_row_kernel, tile.grid(n, x.device),
            x, *self._sections, bias, y, n, k, k // tile.split, self._words, cdiv(n, tile.block_n),
            **self._constants, GATED=gated, BIAS=bias is not None, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
            num_warps=tile.warps,
        )  # fmt: skip

    def _multiply_few(
        self, x: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor, gated: int, *, in_parts: bool
    ) -> None:
        assert x.is_contiguous()
        m, (n, k) = len(x), self.shape
        tile = self.few_rows[m]
        launch(
            few_rows_kernel, (cdiv(n, tile.block_n), tile.split),
            x, *self._sections, bias, y, self._space.parts, self._space.arrived,
            m, n, k, tile.span, self._words, y.stride(-2),
            **self._constants, GATED=gated, BIAS=bias is not None, EVEN=tile.span * tile.split == k,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, SPLIT=tile.split, IN_PARTS=in_parts,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    def write(self, out: torch.Tensor, start: int = 0) -> None:
        """Write rows of the weight from row ``start`` on to contiguous ``out [rows, k]``, rounded to its dtype."""
        weight = self._weight
        packed_plain.write(PackedWeight(weight.rows[start : start + len(out)], weight.packing, weight.columns), out)
