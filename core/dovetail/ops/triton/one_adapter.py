"""Compute the product of a layer and few tokens with the only adapter that occurs among them, in one kernel.

Every program reads all of ``x`` for its rows of the weight, and so multiplies ``x`` with the first matrix of the adapter beside them: the matrix
has as many rows as the adapter has ranks, few beside the rows of a tile. What results stays in registers, and the second matrix adds it when the loop has ended. No program
waits for another one, and nothing is between this kernel and the one that makes ``x``, so that it starts as early as the product without adapters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.low_rank import ONE_ROWS
from dovetail.ops.triton.launch import launch, prefetch
from dovetail.ops.triton.low_rank import ROW_BLOCK
from dovetail.ops.triton.matmul import Workspace, finish_rows, rows_of
from dovetail.ops.triton.sizes import cdiv
from dovetail.ops.triton.tuning import ProductTile, tile_of

if TYPE_CHECKING:
    from dovetail.ops.adapter_weights import LowRankWeights, TokenTiles


@triton.jit(do_not_specialize=["m"], do_not_specialize_on_alignment=["ranks", "slots", "groups", "blocks"])
def _one_adapter(
    x, w, bias, y, parts, arrived, m, n, k, span, a, a_stride, b, b_stride, ranks, rank_stride, slots, groups, blocks,
    GATED: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    AHEAD: tl.constexpr, IN_PARTS: tl.constexpr, RANK: tl.constexpr, ROW_BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    tile, part = tl.program_id(0), tl.program_id(1)
    rows = rows_of(tile, n, GATED, BLOCK_N)
    local, token, at = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    source = w + rows.to(tl.int64)[:, None] * k + part * span + at[None, :]
    tokens = x + token[:, None] * k + part * span + at[None, :]
    present = token[:, None] < m
    if PDL:
        gdc_launch_dependents()
    slot = tl.load(slots, cache_modifier=".cg").to(tl.int64)
    own = 0 if GATED else tl.load(blocks + tile * BLOCK_N // ROW_BLOCK * 3)
    if PDL and AHEAD:
        line = tl.minimum(tl.arange(0, AHEAD) * 64, span - 1)
        prefetch(w + rows.to(tl.int64)[:, None] * k + part * span + line[None, :])
    columns: tl.constexpr = RANK * 2 if GATED else RANK  # if GATED, those of the gates come first
    column = tl.arange(0, columns)
    first = a + slot * a_stride + (own * RANK + column).to(tl.int64)[:, None] * k + part * span + at[None, :]
    half = column // RANK if GATED else own + tl.zeros_like(column)
    mine = (local % 2)[:, None] == half[None] if GATED else (local >= 0)[:, None] & (column >= 0)[None]
    # without the rank of the adapter, for which the loop would wait; what is beyond it is not used
    second = tl.load(
        b + slot * b_stride + rows.to(tl.int64)[:, None] * RANK + (column % RANK)[None], mine, 0.0, cache_modifier=".cg"
    )
    rank = tl.load(ranks + slot * rank_stride + half, cache_modifier=".cg")
    group = tl.load(groups + token, token < m, -1, cache_modifier=".cg")
    if PDL:
        gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    one = tl.full([BLOCK_M, columns], 1.0, tl.float32)
    low = tl.zeros([BLOCK_M, columns], tl.float32)
    tl.assume(span > 0)  # otherwise ptxas lets each product wait for the one before it
    for start in range(0, span, BLOCK_K):
        left = tl.load(source + start, eviction_policy="evict_first")
        right = tl.load(tokens + start, present, 0.0)
        matrix = tl.load(first + start)
        piece = tl.dot(right, tl.trans(matrix), input_precision="ieee")
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
        # an addition would become part of the product, with the same result
        low = tl.fma(piece, one, low)
    used = column % RANK < rank
    lower = tl.where((group == 0)[:, None] & used[None], low, 0.0).to(x.dtype.element_ty)
    total = tl.dot(tl.where(used[None], second, 0.0), tl.trans(lower), total, input_precision="ieee")
    finish_rows(total, y, bias, parts, arrived, rows, tile, part, m, n, GATED, BIAS, BLOCK_M, BLOCK_N, SPLIT, IN_PARTS)


_TILES = {
    (6144, 4096): ProductTile(64, 64, 128, 4, 6, ahead=8),
    (4096, 4096): ProductTile(64, 64, 128, 4, 5, split=2),
    (28672, 4096): ProductTile(64, 256, 64, 8, 4, ahead=8),
    (4096, 14336): ProductTile(64, 64, 128, 4, 6, split=2, ahead=8),
}
"""Map (n, k) of the weight to the tile for up to ``ONE_ROWS`` rows, as measured with rank 16. There is one for fewer rows, too: the kernel multiplies ``x`` as the left operand, whose tiles are 64 high."""
_SHARED_BYTES = 224 << 10
"""The largest memory of the pipeline of a program."""


def one_adapter_tile(n: int, k: int, rank: int, *, gated: bool, itemsize: int) -> ProductTile | None:
    """Return the tile for a weight ``[n, k]`` and slots of ``rank``, or None if the product of ONE_ROWS rows has no measured tile, or the first matrices have too many rows to be read
    in every program, or not a power of two."""
    tile = _TILES.get((n, k)) or _like_measured(tile_of(ONE_ROWS, n, k), k)
    columns = rank * 2 if gated else rank
    if tile is None or columns & (columns - 1) or columns > max(32, tile.block_n // 4):
        return None
    stages = _SHARED_BYTES // ((tile.block_m + tile.block_n + columns) * tile.block_k * itemsize)
    return tile._replace(stages=min(tile.stages, stages)) if stages > 1 else None


def _like_measured(tile: ProductTile | None, k: int) -> ProductTile | None:
    """Return the tile of a product without adapters, with longer rounds if it has few rows of the weight: each round waits for the product with the first matrix."""
    if tile is None or tile.block_m != ONE_ROWS:
        return None
    if tile.block_n > 64:
        return tile
    return tile._replace(block_k=128, stages=5, ahead=0) if k // tile.split % 128 == 0 else None


def one_adapter(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    adapters: LowRankWeights,
    tokens: TokenTiles,
    tile: ProductTile,
    space: Workspace,
    gated: int = False,
    *,
    in_parts: bool = False,
) -> torch.Tensor:
    """Compute ``matmul.matmul`` with what the adapters of ``tokens`` add, of which at most one occurs. Every ``tile.block_n`` rows, at least ``ROW_BLOCK``, lie in one part, or are
    gates and the values that they gate."""
    assert x.is_contiguous()
    (m, k), n, rank, ranks = x.shape, weight.shape[0], adapters.a.shape[2], adapters.device_ranks
    assert ranks is not None
    if in_parts:
        y = torch.empty(tile.split, m, n, dtype=torch.float32, device=x.device)
    else:
        y = torch.empty(m, n // 2 if gated else n, dtype=x.dtype, device=x.device)
    launch(
        _one_adapter, (cdiv(n, tile.block_n), tile.split),
        x, weight, bias, y, space.parts, space.arrived, m, n, k, k // tile.split, adapters.a, adapters.a.stride(0),
        adapters.b, adapters.b.stride(0), ranks, ranks.stride(0), tokens.slots, tokens.groups, adapters.blocks,
        GATED=gated, BIAS=bias is not None, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, SPLIT=tile.split,
        AHEAD=tile.ahead, IN_PARTS=in_parts, RANK=rank, ROW_BLOCK=ROW_BLOCK, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y
