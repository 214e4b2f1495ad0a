"""Compute the product of a layer and few tokens, and add what their adapters make of them. If only one adapter occurs, one kernel does all (see ``one_adapter``).
Otherwise the product runs beside ``low_rank_few.shrink``.

Both kernels read ``x``, which is complete when the product starts, because ``shrink`` is a leader (see ``launch``). The product waits
for ``shrink`` when its loop has ended, and then adds the second matrices as further columns of the weight (see ``adapted_columns``). There are two kernels for it: if
few adapters occur, the first columns are in registers then; if several occur, a second loop requests all columns ahead. If many occur, ``expand``
is faster: the product adds nothing, and the kernel after it does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.adapter_weights import AdapterCount
from dovetail.ops.low_rank import SMALL_TILE
from dovetail.ops.triton.adapted_columns import add_columns, addresses, column_of, columns_at, prefetch_columns
from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.low_rank import ROW_BLOCK
from dovetail.ops.triton.low_rank_few import RANK_BLOCK, expand, expand_gate, shrink
from dovetail.ops.triton.matmul import GATE_KINDS, finish_rows, rows_of, workspace
from dovetail.ops.triton.one_adapter import one_adapter, one_adapter_tile
from dovetail.ops.triton.sizes import cdiv
from dovetail.ops.triton.tuning import MAX_ROWS, ProductTile, tile_of

if TYPE_CHECKING:
    from dovetail.ops.activation import Activation
    from dovetail.ops.adapter_weights import LowRankWeights, TokenTiles

FIRST, STEP = 32, 64
"""The numbers of columns of the first step that adds second matrices, and of the steps after it. An adapter of rank 16 has 16 columns, or
32 for the gate and the gated values. With a larger first step, one adapter costs more, with smaller later steps, 8 cost more."""
AHEAD = 128
"""The number of columns that are prefetched when the product begins."""
SEVERAL_STEP, SEVERAL_DEPTH, SEVERAL_AHEAD = 128, 4, 256
"""If several adapters occur: the number of columns that are added at once, the number of such steps in the pipeline, and the columns that are prefetched."""
SEVERAL_BLOCK_M = 64
"""The number of rows of tiles for which the second loop was measured to be faster than ``expand``."""


@triton.jit
def _matrices(
    at, slot, rank, rows, local, b, b_stride, own, GATED: tl.constexpr, RANK: tl.constexpr, STEP: tl.constexpr
):
    """Return the columns from ``at`` on, ``[rows, STEP]``."""
    block = at // RANK_BLOCK + tl.arange(0, STEP // RANK_BLOCK)
    address, used = addresses(block, slot, rank, rows, local, b, b_stride, own, GATED, RANK)
    inner = tl.arange(0, RANK_BLOCK)[None, None]
    left = tl.load(address[:, :, None] + inner, mask=used[:, :, None], other=0.0, cache_modifier=".cg")
    return tl.reshape(left, [rows.shape[0], STEP])


@triton.jit
def _add(
    total, left, at, rank, low, group, own, num_parts,
    GATED: tl.constexpr, RANK: tl.constexpr, STEP: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Add to ``total [rows, tokens]`` the products of the columns ``left`` from ``at`` on. ``group`` has the index in ``TokenTiles.slots`` of
    each token."""
    block = at // RANK_BLOCK + tl.arange(0, STEP // RANK_BLOCK)
    place, part, first = column_of(block, own, GATED, RANK)
    inner = tl.arange(0, RANK_BLOCK)[None, None]
    token = tl.arange(0, BLOCK_M)
    part += tl.zeros_like(block)
    from_low = low + ((token * num_parts)[:, None] + part[None]) * RANK + first[None]
    used = (first < rank)[None] & (group[:, None] == place[None])
    right = tl.load(from_low[:, :, None] + inner, mask=used[:, :, None], other=0.0, cache_modifier=".cg")
    return tl.dot(left, tl.trans(tl.reshape(right, [BLOCK_M, STEP])), total, input_precision="ieee")


@triton.jit(do_not_specialize=["m"], do_not_specialize_on_alignment=["ranks", "slots", "count", "groups", "blocks"])
def _adapted_rows(
    x, w, bias, y, parts, arrived, m, n, k, span,
    low, b, b_stride, ranks, rank_stride, slots, count, groups, blocks, num_parts,
    ADDS: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, IN_PARTS: tl.constexpr, RANK: tl.constexpr, FIRST: tl.constexpr, STEP: tl.constexpr,
    AHEAD: tl.constexpr, ROW_BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    tile, part = tl.program_id(0), tl.program_id(1)
    rows = rows_of(tile, n, GATED, BLOCK_N)
    local, token, at = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    source = w + rows.to(tl.int64)[:, None] * k + part * span + at[None, :]
    tokens = x + token[:, None] * k + part * span + at[None, :]
    present = token[:, None] < m
    if PDL:
        gdc_launch_dependents()
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if ADDS:
        per_slot: tl.constexpr = RANK * 2 if GATED else RANK
        end = tl.load(count + 1, cache_modifier=".cg") * per_slot
        group = tl.load(groups + token, mask=token < m, other=-1, cache_modifier=".cg")
        own = 0 if GATED else tl.load(blocks + tile * BLOCK_N // ROW_BLOCK * 3)
        slot, rank = columns_at(part * FIRST, end, m, slots, own, ranks, rank_stride, GATED, RANK, FIRST)
        if PDL:
            prefetch_columns(
                part, end, m, slots, own, ranks, rank_stride, rows, local, b, b_stride, w + rows.to(tl.int64) * k + part * span,
                GATED, RANK, SPLIT, FIRST, STEP, AHEAD,
            )  # fmt: skip
    for start in range(0, span, BLOCK_K):
        left = tl.load(source + start, eviction_policy="evict_first")
        right = tl.load(tokens + start, present, 0.0, cache_modifier=".cg")
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    if ADDS:
        matrices = _matrices(part * FIRST, slot, rank, rows, local, b, b_stride, own, GATED, RANK, FIRST)
        if PDL:
            gdc_wait()  # for ``low``; ``x`` was complete before this kernel started
        if part * FIRST < end:
            total = _add(total, matrices, part * FIRST, rank, low, group, own, num_parts, GATED, RANK, FIRST, BLOCK_M)
            for later in tl.range(SPLIT * FIRST + part * STEP, end, SPLIT * STEP, num_stages=1):
                more, its_rank = columns_at(later, end, m, slots, own, ranks, rank_stride, GATED, RANK, STEP)
                columns = _matrices(later, more, its_rank, rows, local, b, b_stride, own, GATED, RANK, STEP)
                total = _add(total, columns, later, its_rank, low, group, own, num_parts, GATED, RANK, STEP, BLOCK_M)
    elif PDL:
        gdc_wait()
    finish_rows(total, y, bias, parts, arrived, rows, tile, part, m, n, GATED, BIAS, BLOCK_M, BLOCK_N, SPLIT, IN_PARTS)


@triton.jit(do_not_specialize=["m"], do_not_specialize_on_alignment=["ranks", "slots", "count", "groups", "blocks"])
def _product_then_adapters(
    x, w, bias, y, parts, arrived, m, n, k, span,
    low, b, b_stride, ranks, rank_stride, slots, count, groups, blocks, num_parts,
    GATED: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    IN_PARTS: tl.constexpr, RANK: tl.constexpr, STEP: tl.constexpr, DEPTH: tl.constexpr, AHEAD: tl.constexpr, ROW_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    tile, part = tl.program_id(0), tl.program_id(1)
    rows = rows_of(tile, n, GATED, BLOCK_N)
    local, token, at = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    own_k = w + rows.to(tl.int64) * k + part * span
    source, tokens = own_k[:, None] + at[None, :], x + token[:, None] * k + part * span + at[None, :]
    if PDL:
        gdc_launch_dependents()
    end = tl.load(count + 1, cache_modifier=".cg") * RANK * (2 if GATED else 1)
    group = tl.load(groups + token, mask=token < m, other=-1, cache_modifier=".cg")
    own = 0 if GATED else tl.load(blocks + tile * BLOCK_N // ROW_BLOCK * 3)
    if PDL:
        prefetch_columns(
            part, end, m, slots, own, ranks, rank_stride, rows, local, b, b_stride, own_k, GATED, RANK, SPLIT, STEP, STEP, AHEAD
        )  # fmt: skip
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, span, BLOCK_K):
        left = tl.load(source + start, eviction_policy="evict_first")
        right = tl.load(tokens + start, token[:, None] < m, 0.0, cache_modifier=".cg")
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    if PDL:
        gdc_wait()  # for ``low``; ``x`` was complete before this kernel started
    total = add_columns(
        total, part * STEP, SPLIT * STEP, end, m, low, b, b_stride, ranks, rank_stride, slots, group, rows, local, own, num_parts,
        GATED, RANK, STEP, DEPTH,
    )  # fmt: skip
    finish_rows(total, y, bias, parts, arrived, rows, tile, part, m, n, GATED, BIAS, BLOCK_M, BLOCK_N, SPLIT, IN_PARTS)


class AdaptedRows:
    """Compute the products of one ``weight [out, in]`` with up to ``MAX_ROWS`` rows, and what their adapters add."""

    def __init__(self, weight: torch.Tensor, low_rank: LowRankWeights) -> None:
        self._weight, self._low_rank = weight.detach(), low_rank
        self._space = workspace(weight.device)
        n, k = weight.shape
        # one row is computed by the kernel for several
        tiles = [tile_of(max(2, rows), n, k) for rows in range(MAX_ROWS + 1)]
        self._tiles = [tile if tile is not None and self._fits(tile) else None for tile in tiles]
        self._pairs = low_rank.parts == ((0, n // 2), (n // 2, n // 2))
        one = {
            gated: one_adapter_tile(n, k, low_rank.a.shape[2], gated=gated, itemsize=weight.element_size())
            for gated in (False, True)
        }
        self._one = {gated: tile if tile is not None and self._fits(tile) else None for gated, tile in one.items()}

    def _fits(self, tile: ProductTile) -> bool:
        """Return True if every tile of rows lies in one part."""
        parts, size = self._low_rank.parts, max(tile.block_n, ROW_BLOCK)
        whole = sum(rows for _, rows in parts) == self._weight.shape[0]
        return whole and all(start % size == 0 and rows % size == 0 for start, rows in parts)

    def can(self, tokens: TokenTiles, rows: int, *, gated: bool = False, parts: bool = False) -> bool:
        """Return True if there is a kernel for ``rows`` rows, also for the gate, or in ``parts``."""
        if rows > MAX_ROWS or tokens.size != SMALL_TILE:
            return False
        tile = self._tiles[rows]
        return tile is not None and (self._pairs or not gated) and (tile.split > 1 or not parts)

    def __call__(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        tokens: TokenTiles,
        gated: Activation | None = None,
        *,
        in_parts: bool = False,
    ) -> torch.Tensor:
        """Compute what ``matmul.matmul`` computes, with the adapters of ``tokens``. ``can`` must be True."""
        kind = GATE_KINDS[gated] if gated else False
        one = self._one[gated is not None]
        if tokens.adapters is AdapterCount.ONE and one is not None:
            return one_adapter(x, self._weight, bias, self._low_rank, tokens, one, self._space, kind, in_parts=in_parts)
        low = shrink(x, self._low_rank, tokens, leads=True)
        if tokens.adapters <= AdapterCount.FEW:
            return self.product(x, bias, low, tokens, kind, in_parts=in_parts)
        if tokens.adapters is AdapterCount.SEVERAL and self._has_second_loop(len(x)):
            return self.product(x, bias, low, tokens, kind, in_parts=in_parts, second_loop=True)
        y = self.product(x, bias, low, tokens, in_parts=in_parts, adds=False)
        if gated:
            return expand_gate(y, low, self._low_rank, tokens, gated)
        expand(y[0] if in_parts else y, low, self._low_rank, tokens)
        return y

    def _has_second_loop(self, rows: int) -> bool:
        tile = self._tiles[rows]
        return tile is not None and tile.block_m == SEVERAL_BLOCK_M

    def product(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        low: torch.Tensor,
        tokens: TokenTiles,
        gated: int = False,
        *,
        in_parts: bool = False,
        adds: bool = True,
        second_loop: bool = False,
    ) -> torch.Tensor:
        """Launch the kernel after ``shrink``, which returned ``low``. Without ``adds``, it adds nothing for adapters. With ``second_loop``, it
        is the one for several adapters."""
        tile = self._tiles[len(x)]
        assert tile is not None
        assert x.is_contiguous()
        (m, k), n, weights = x.shape, self._weight.shape[0], self._low_rank
        assert weights.device_ranks is not None
        if in_parts:
            y = torch.empty(tile.split, m, n, dtype=torch.float32, device=x.device)
        else:
            y = torch.empty(m, n // 2 if gated else n, dtype=x.dtype, device=x.device)
        given: tuple[Any, ...] = (
            x, self._weight, bias, y, self._space.parts, self._space.arrived, m, n, k, k // tile.split,
            low, weights.b, weights.b.stride(0), weights.device_ranks, weights.device_ranks.stride(0),
            tokens.slots, tokens.used, tokens.groups, weights.blocks, low.shape[1],
        )  # fmt: skip
        constants: dict[str, Any] = {
            "GATED": gated, "BIAS": bias is not None, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
            "SPLIT": tile.split, "IN_PARTS": in_parts, "RANK": low.shape[2], "ROW_BLOCK": ROW_BLOCK, "num_warps": tile.warps,
            "num_stages": tile.stages,
        }  # fmt: skip
        grid = cdiv(n, tile.block_n), tile.split
        if second_loop:
            own = {"STEP": SEVERAL_STEP, "DEPTH": SEVERAL_DEPTH, "AHEAD": SEVERAL_AHEAD}
            launch(_product_then_adapters, grid, *given, **constants, **own)
        else:
            launch(_adapted_rows, grid, *given, **constants, ADDS=adds, FIRST=FIRST, STEP=STEP, AHEAD=AHEAD)
        return y
