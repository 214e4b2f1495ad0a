"""Multiply on CUDA with weights whose codes stand for numbers of a table."""

from __future__ import annotations

import torch

from dovetail.ops.activation import Activation
from dovetail.ops.integers import PLANES
from dovetail.ops.triton.integers import planes_with_groups
from dovetail.ops.triton.launch import INTERPRETED, launch
from dovetail.ops.triton.matmul import GATE_KINDS, workspace
from dovetail.ops.triton.sizes import cdiv
from dovetail_quantization.coded_product import CodedProduct
from dovetail_quantization.table_weights import TableWeight
from dovetail_quantization.triton.integer_rows import IntegerTile
from dovetail_quantization.triton.one_row import OneRowTile
from dovetail_quantization.triton.table_numbers import byte_words, pairs_assembly, whole_numbers
from dovetail_quantization.triton.table_one_row import one_row_kernel
from dovetail_quantization.triton.table_rows import few_kernel, plain_kernel
from dovetail_quantization.triton.table_tiles import FEWER_ROWS, MOST_ROWS, few_rows_tile, one_row_tile


class TableProduct(CodedProduct):
    """Multiply with weights whose blocks are multiples of 32 columns."""

    def __init__(self, weight: TableWeight) -> None:
        n, k = len(weight.codes), weight.columns
        most = MOST_ROWS if weight.block >= PLANES // 2 else FEWER_ROWS
        super().__init__((n, k), most, f"{weight.kind} in planes")
        self._weight = weight
        self._whole = weight.codes.shape[1] * 2
        self._table = weight.scales.new_tensor(weight.table)
        self._space = workspace(weight.codes.device)
        numbers, self._factor = whole_numbers(weight.table)

        def words(given: list[int]) -> torch.Tensor:
            return torch.tensor(given, dtype=torch.int32, device=weight.codes.device)

        self._numbers, self._bytes = words(numbers), words(byte_words(weight.table))
        texts = {dtype: pairs_assembly(weight.table, dtype) for dtype in (torch.bfloat16, torch.float16)}
        self._texts = {} if INTERPRETED else texts
        self._groups = planes_with_groups(self._whole, weight.block)
        one = k == self._whole and weight.block % (PLANES // 2) == 0
        self.one_row = one_row_tile(n, k) if one else None
        self.one_row_in_parts = one_row_tile(n, k, in_parts=True) if one else None
        self.tiles = [few_rows_tile(max(rows, 1), n, self._whole) for rows in range(MOST_ROWS + 1)]

    def is_few(self, x: torch.Tensor) -> bool:
        """See ``CodedProduct``."""
        return super().is_few(x) and (len(x) <= FEWER_ROWS or x.dtype is not torch.float32)

    def few_rows(
        self, x: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None = None
    ) -> torch.Tensor:
        """See ``CodedProduct``."""
        n, gated = self._shape[0], 0 if activation is None else int(GATE_KINDS[activation])
        y = x.new_empty(len(x), n // 2 if gated else n)
        if self._is_one(x):
            assert self.one_row is not None
            self._multiply_one(x, bias, y, gated, self.one_row)
        else:
            self._multiply_few(x, bias, y, gated, self.tiles[len(x)], in_parts=False)
        return y

    def few_rows_in_parts(self, x: torch.Tensor) -> torch.Tensor | None:
        """See ``CodedProduct``."""
        n = self._shape[0]
        if self._is_one(x):
            if (one := self.one_row_in_parts) is None:
                return None
            y = torch.empty(one.split, 1, n, dtype=torch.float32, device=x.device)
            self._multiply_one(x, None, y, 0, one)
            return y
        tile = self.tiles[len(x)]
        if tile.split == 1:
            return None
        y = torch.empty(tile.split, len(x), n, dtype=torch.float32, device=x.device)
        self._multiply_few(x, None, y, 0, tile, in_parts=True)
        return y

    def _is_one(self, x: torch.Tensor) -> bool:
        """Return True if ``x`` is one row that the kernel of one row multiplies: it rounds more than float32 does."""
        return len(x) == 1 and self.one_row is not None and x.dtype is not torch.float32

    def _multiply_one(
        self, x: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor, gated: int, tile: OneRowTile
    ) -> None:
        (n, k), weight = self._shape, self._weight
        launch(
            one_row_kernel, tile.grid(n, x.device),
            x.view(torch.int32), weight.codes.view(torch.int32), weight.scales, self._bytes, self._numbers, bias, y, n, k, k // tile.split, weight.block,
            self._factor, cdiv(n, tile.block_n),
            BFLOAT16=x.dtype is torch.bfloat16, GATED=gated, BIAS=bias is not None,
            BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, num_warps=tile.warps,
        )  # fmt: skip

    def _multiply_few(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        y: torch.Tensor,
        gated: int,
        tile: IntegerTile,
        *,
        in_parts: bool,
    ) -> None:
        assert x.is_contiguous()
        (n, k), weight = self._shape, self._weight
        launch(
            few_kernel, (cdiv(n, tile.block_n), tile.split),
            x, weight.codes.view(torch.int16), weight.scales, self._table, bias, y, self._space.parts, self._space.arrived,
            len(x), n, k, self._whole // 4, self._whole // tile.split, weight.block,
            TEXT=self._texts.get(x.dtype), GROUPS=self._groups, GATED=gated, BIAS=bias is not None, EVEN=k == self._whole,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, SPLIT=tile.split, IN_PARTS=in_parts,
            STAGES=tile.stages, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    def dequantized(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """See ``CodedProduct``."""
        codes, scales, k = self._weight.codes[rows], self._weight.scales[:, rows], self._shape[1]
        out = torch.empty(len(codes), k, dtype=dtype, device=codes.device)
        launch(
            plain_kernel, (cdiv(len(out), 64), self._whole // PLANES),
            codes.view(torch.int16), scales, self._table, out, len(out), k, self._whole // 4, scales.stride(0), self._weight.block,
            TEXT=None if dtype is torch.float32 else self._texts.get(torch.float16), EVEN=k == self._whole, BLOCK_N=64,
        )  # fmt: skip
        return out
