"""Multiply few tokens with the low-rank matrices of their adapters, beside and inside the product of the layer.

``shrink`` computes ``x @ a.T``. It is a leader (see ``launch``): when the kernel after it starts, ``x`` is complete. The
product of the layer that follows therefore reads ``x`` at once, runs together with ``shrink``, and waits for it only
before it adds ``b``. For that the product is continued: the tiles of tokens, each with its own ``b``, are further columns
of the weight, and the row of ``x`` of a token has its results of ``shrink`` in the columns of its tile, and zeros in those
of the others. So one adapter costs one step of the product's loop, and 64 adapters read each ``b`` once.
``expand`` does the same after products that have no such kernel.

Tiles are sorted by slots and are the first ``used`` of ``TokenTiles.tiles``. The grids do not depend on which slots occur, so
that they can be captured.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.launch import launch, prefetch, processors
from dovetail.ops.triton.low_rank import ROW_BLOCK
from dovetail.ops.triton.matmul import GATE_KINDS, finish_rows, rows_of, workspace
from dovetail.ops.triton.tuning import MAX_ROWS, ProductTile, tile_of

if TYPE_CHECKING:
    from dovetail.ops.activation import Activation
    from dovetail.ops.adapter_weights import LowRankWeights, TokenTiles

RANK_BLOCK: tl.constexpr = tl.constexpr(16)
"""The ranks of slots are multiples of this."""
INPUT_BLOCK = 512
"""The number of inputs of one program of ``shrink``. The last program of a tile to finish adds up the sums of all."""
STEP = 128
"""The number of columns of one step that adds ``b``: columns of 8 tiles of rank 16."""
PROGRAMS = 3
"""The number of programs of ``shrink`` that a multiprocessor holds."""
AHEAD_STEPS = 4
"""The number of steps whose ``b`` are prefetched when the product begins."""
MAX_SUMS = 1 << 15


@triton.jit
def _tile_rows(
    a, a_stride, ranks, rank_stride, tiles, tile, used, part, first, k, inputs,
    RANK: tl.constexpr,
):  # fmt: skip
    """Return the rows of ``a`` of a tile ``[RANK_BLOCK, inputs of k]``, zeros if it has none, and the rank of its adapter."""
    present = tile < used
    slot = tl.load(tiles + tl.where(present, tile, 0) * 3, cache_modifier=".cg").to(tl.int64)
    rank = tl.where(present, tl.load(ranks + slot * rank_stride + part, cache_modifier=".cg"), 0)
    r = first + tl.arange(0, RANK_BLOCK)
    rows = a + slot * a_stride + (part * RANK + r).to(tl.int64)[:, None] * inputs + k[None]
    return tl.load(rows, mask=(k < tl.where(first < rank, inputs, 0))[None], other=0.0, cache_modifier=".cg"), rank


@triton.jit(do_not_specialize_on_alignment=["ranks", "order", "tiles", "count"])
def _shrink(
    x, x_stride, inputs, a, a_stride, ranks, rank_stride, order, tiles, count, low, sums, arrived, num_parts,
    RANK: tl.constexpr, TILE: tl.constexpr, INPUT_BLOCK: tl.constexpr, SPLITS: tl.constexpr, LEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL and not LEADS:
        gdc_launch_dependents()
    programs, unit, split = tl.num_programs(0), tl.program_id(1), tl.program_id(2)
    part, first = unit // (RANK // RANK_BLOCK), unit % (RANK // RANK_BLOCK) * RANK_BLOCK
    used = tl.load(count, cache_modifier=".cg")
    k = split * INPUT_BLOCK + tl.arange(0, INPUT_BLOCK)
    begin = tl.program_id(0)
    weight, rank = _tile_rows(a, a_stride, ranks, rank_stride, tiles, begin, used, part, first, k, inputs, RANK)
    if PDL:
        gdc_wait()
        if LEADS:
            gdc_launch_dependents()
    m, r = tl.arange(0, TILE), tl.arange(0, RANK_BLOCK)
    for tile in range(begin, used, programs):
        following, next_rank = _tile_rows(
            a, a_stride, ranks, rank_stride, tiles, tile + programs, used, part, first, k, inputs, RANK
        )
        if first < rank:
            start = tl.load(tiles + tile * 3 + 1)
            real = m < tl.load(tiles + tile * 3 + 2)
            token = tl.load(order + start + m, mask=real, other=0).to(tl.int64)
            given = tl.load(
                x + token[:, None] * x_stride + k[None], mask=real[:, None] & (k < inputs)[None], other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            total = tl.dot(given, tl.trans(weight), input_precision="ieee")
            finished = SPLITS == 1
            if SPLITS > 1:
                at = tile * tl.num_programs(1) + unit
                mine = sums + at.to(tl.int64) * (SPLITS * TILE * RANK_BLOCK) + m[:, None] * RANK_BLOCK + r[None]
                tl.store(mine + split * TILE * RANK_BLOCK, total)
                tl.debug_barrier()
                finished = tl.atomic_add(arrived + at, 1, sem="acq_rel") == SPLITS - 1
                if finished:
                    total = tl.zeros([TILE, RANK_BLOCK], tl.float32)
                    for other in tl.static_range(SPLITS):
                        total += tl.load(mine + other * TILE * RANK_BLOCK, cache_modifier=".cg")
                    tl.store(arrived + at, 0)
            if finished:
                to = low + (token * num_parts + part)[:, None] * RANK + (first + r)[None]
                total = tl.where((first + r < rank)[None], total, 0.0)
                tl.store(to, total.to(low.dtype.element_ty), mask=real[:, None])
        weight, rank = following, next_rank


@triton.jit
def slots_of_step(at, used, tiles, RANK: tl.constexpr, STEP: tl.constexpr):
    """Return the slots of the columns from ``at`` on, of RANK_BLOCK columns each."""
    column = at + tl.arange(0, STEP // RANK_BLOCK) * RANK_BLOCK
    return tl.load(tiles + column // RANK * 3, mask=column < used * RANK, other=0, cache_modifier=".cg").to(tl.int64)


@triton.jit
def used_of_step(at, used, slot, part, ranks, rank_stride, RANK: tl.constexpr, STEP: tl.constexpr):
    """Return which columns from ``at`` on belong to adapters that have matrices of this ``part``, like ``slots_of_step``."""
    column = at + tl.arange(0, STEP // RANK_BLOCK) * RANK_BLOCK
    rank = tl.load(ranks + slot * rank_stride + part, mask=column < used * RANK, other=0, cache_modifier=".cg")
    return column % RANK < rank


@triton.jit
def add_step(
    total, at, slot, columns, rows, inside, low, b, b_stride, place, present, part, num_parts,
    RANK: tl.constexpr, STEP: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Add to ``total [rows, tokens]`` what the ``columns`` from ``at`` on give to the rows that are ``inside``. ``place`` has the
    tile of each token."""
    token = tl.arange(0, BLOCK_M)
    column = at + tl.arange(0, STEP // RANK_BLOCK) * RANK_BLOCK
    tile, first = column // RANK, column % RANK
    inner = tl.arange(0, RANK_BLOCK)[None, None]
    from_b = b + (slot * b_stride + first)[None] + rows.to(tl.int64)[:, None] * RANK
    left = tl.load(
        from_b[:, :, None] + inner, mask=(inside[:, None] & columns[None])[:, :, None], other=0.0, cache_modifier=".cg"
    )
    from_low = low + ((token * num_parts + part) * RANK)[:, None] + first[None]
    own = present[:, None] & columns[None] & (place[:, None] == tile[None])
    right = tl.load(from_low[:, :, None] + inner, mask=own[:, :, None], other=0.0, cache_modifier=".cg")
    right = tl.trans(tl.reshape(right, [BLOCK_M, STEP]))
    return tl.dot(tl.reshape(left, [rows.shape[0], STEP]), right, total, input_precision="ieee")


@triton.jit
def _add_own(
    total, at, slot, columns, others, local, rows, low, b, b_stride, place, present, own, num_parts,
    GATED: tl.constexpr, RANK: tl.constexpr, STEP: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Compute ``add_step`` for all rows of a tile, which are of part ``own``, or if GATED, in turn of gate (``columns``) and up
    (``others``)."""
    inside = local % 2 == 0 if GATED else local >= 0
    total = add_step(
        total, at, slot, columns, rows, inside, low, b, b_stride, place, present, own, num_parts, RANK, STEP, BLOCK_M
    )
    if GATED:
        inside = local % 2 == 1
        total = add_step(
            total, at, slot, others, rows, inside, low, b, b_stride, place, present, 1, num_parts, RANK, STEP, BLOCK_M
        )
    return total


@triton.jit
def prefetch_step(
    b, b_stride, w, rows, at, used, part, tiles, ranks, rank_stride,
    RANK: tl.constexpr, STEP: tl.constexpr,
) -> None:  # fmt: skip
    """Prefetch the ``b`` of the columns from ``at`` on. ``w`` is what is prefetched of columns that are not used. ``part`` is the
    part of each row."""
    column = at + tl.arange(0, STEP // RANK_BLOCK) * RANK_BLOCK
    slot = slots_of_step(at, used, tiles, RANK, STEP)
    places = ranks + (slot * rank_stride)[None] + part[:, None]
    rank = tl.load(places, mask=(column < used * RANK)[None], other=0, cache_modifier=".cg")
    address = b + (slot * b_stride + column % RANK)[None] + rows.to(tl.int64)[:, None] * RANK
    prefetch(tl.where((column % RANK)[None] < rank, address, w[:, None]))


@triton.jit(do_not_specialize=["m"], do_not_specialize_on_alignment=["ranks", "tiles", "count", "places", "blocks"])
def _adapted_rows(
    x, w, bias, y, parts, arrived, m, n, k, span,
    low, b, b_stride, ranks, rank_stride, tiles, count, places, blocks, num_parts,
    GATED: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, IN_PARTS: tl.constexpr, RANK: tl.constexpr, STEP: tl.constexpr, ROW_BLOCK: tl.constexpr,
    AHEAD_STEPS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    tile, part = tl.program_id(0), tl.program_id(1)
    rows = rows_of(tile, n, GATED, BLOCK_N)
    local, token, at = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    source = w + rows.to(tl.int64)[:, None] * k + part * span + at[None, :]
    tokens = x + token[:, None] * k + part * span + at[None, :]
    present = token[:, None] < m
    if PDL:
        gdc_launch_dependents()
    used = tl.load(count, cache_modifier=".cg")
    first = part * STEP
    slot = slots_of_step(first, used, tiles, RANK, STEP)
    place = tl.load(places + token, mask=token < m, other=-1, cache_modifier=".cg")
    own = 0 if GATED else tl.load(blocks + tile * BLOCK_N // ROW_BLOCK * 3)
    columns = used_of_step(first, used, slot, own, ranks, rank_stride, RANK, STEP)
    others = used_of_step(first, used, slot, 1, ranks, rank_stride, RANK, STEP) if GATED else columns
    if PDL:
        kinds = local % 2 if GATED else own + tl.zeros([BLOCK_N], tl.int32)
        line = w + rows.to(tl.int64) * k + part * span
        last = tl.minimum(used * RANK, first + AHEAD_STEPS * SPLIT * STEP)
        for ahead in tl.range(first, last, SPLIT * STEP, num_stages=1):
            prefetch_step(b, b_stride, line, rows, ahead, used, kinds, tiles, ranks, rank_stride, RANK, STEP)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, span, BLOCK_K):
        left = tl.load(source + start, eviction_policy="evict_first")
        right = tl.load(tokens + start, present, 0.0, cache_modifier=".cg")
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    if PDL:
        gdc_wait()  # for ``low``; ``x`` was complete before this kernel started
    step = local, rows, low, b, b_stride, place, token < m, own, num_parts
    if first < used * RANK:
        total = _add_own(total, first, slot, columns, others, *step, GATED, RANK, STEP, BLOCK_M)
        for later in tl.range(first + SPLIT * STEP, used * RANK, SPLIT * STEP, num_stages=2):
            slot = slots_of_step(later, used, tiles, RANK, STEP)
            columns = used_of_step(later, used, slot, own, ranks, rank_stride, RANK, STEP)
            others = used_of_step(later, used, slot, 1, ranks, rank_stride, RANK, STEP) if GATED else columns
            total = _add_own(total, later, slot, columns, others, *step, GATED, RANK, STEP, BLOCK_M)
    finish_rows(total, y, bias, parts, arrived, rows, tile, part, m, n, GATED, BIAS, BLOCK_M, BLOCK_N, SPLIT, IN_PARTS)


@triton.jit(do_not_specialize=["m"], do_not_specialize_on_alignment=["ranks", "tiles", "count", "places", "blocks"])
def _expand(
    out, out_stride, m, low, b, b_stride, ranks, rank_stride, tiles, count, places, blocks, num_parts,
    RANK: tl.constexpr, STEP: tl.constexpr, BLOCK_M: tl.constexpr, ROW_BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    block = tl.program_id(0)
    token = tl.arange(0, BLOCK_M)
    if PDL:
        gdc_launch_dependents()
    used = tl.load(count, cache_modifier=".cg")
    part = tl.load(blocks + block * 3)
    rows = tl.load(blocks + block * 3 + 1) + tl.arange(0, ROW_BLOCK)
    inside = rows < tl.load(blocks + block * 3 + 2)
    slot = slots_of_step(0, used, tiles, RANK, STEP)
    columns = used_of_step(0, used, slot, part, ranks, rank_stride, RANK, STEP)
    place = tl.load(places + token, mask=token < m, other=-1, cache_modifier=".cg")
    if PDL:
        prefetch_step(
            b, b_stride, b + tl.zeros([ROW_BLOCK], tl.int64), tl.where(inside, rows, 0), 0, used,
            part + tl.zeros([ROW_BLOCK], tl.int32), tiles, ranks, rank_stride, RANK, STEP,
        )  # fmt: skip
        gdc_wait()
    if used > 0:
        to = out + token.to(tl.int64)[None] * out_stride + rows[:, None]
        real = inside[:, None] & (place >= 0)[None]
        before = tl.load(to, mask=real, other=0.0)
        total = tl.zeros([ROW_BLOCK, BLOCK_M], tl.float32)
        total = add_step(
            total, 0, slot, columns, rows, inside, low, b, b_stride, place, token < m, part, num_parts, RANK, STEP, BLOCK_M
        )  # fmt: skip
        for later in tl.range(STEP, used * RANK, STEP, num_stages=3):
            slot = slots_of_step(later, used, tiles, RANK, STEP)
            columns = used_of_step(later, used, slot, part, ranks, rank_stride, RANK, STEP)
            total = add_step(
                total, later, slot, columns, rows, inside, low, b, b_stride, place, token < m, part, num_parts, RANK, STEP, BLOCK_M
            )  # fmt: skip
        tl.store(to, (before.to(tl.float32) + total).to(out.dtype.element_ty), mask=real)


@functools.cache
def arrivals(device: torch.device) -> torch.Tensor:
    """Return the counters of ``shrink``. The product that runs at the same time has its own (``matmul.Workspace``)."""
    return torch.zeros(MAX_SUMS, dtype=torch.int32, device=device)


def shrink(x: torch.Tensor, weights: LowRankWeights, tokens: TokenTiles, *, leads: bool = False) -> torch.Tensor:
    """Return ``[tokens, parts, rank]``: the products of ``x [tokens, in]`` and the first matrices of the adapters of the tokens.
    With ``leads``, the kernel is a leader (see ``launch``). What the result holds of tokens without an adapter, and beyond the ranks of the adapters, is undefined."""
    a, ranks = weights.a, weights.device_ranks
    assert ranks is not None
    num_parts, rank, inputs = a.shape[1:]
    splits, units = triton.cdiv(inputs, INPUT_BLOCK), num_parts * (rank // RANK_BLOCK.value)
    num_tiles = len(tokens.tiles)
    low = torch.empty(len(x), num_parts, rank, dtype=x.dtype, device=x.device)
    assert num_tiles * units <= MAX_SUMS
    sums = torch.empty(
        num_tiles * units * splits * tokens.size * RANK_BLOCK.value, dtype=torch.float32, device=x.device
    )
    programs = min(num_tiles, max(1, PROGRAMS * processors(x.device) // (units * splits)))
    launch(
        _shrink, (programs, units, splits),
        x, x.stride(0), inputs, a, a.stride(0), ranks, ranks.stride(0), tokens.order, tokens.tiles, tokens.used, low, sums,
        arrivals(x.device), num_parts,
        RANK=rank, TILE=tokens.size, INPUT_BLOCK=INPUT_BLOCK, SPLITS=splits, LEADS=leads, num_stages=1,
    )  # fmt: skip
    return low


def expand(out: torch.Tensor, low: torch.Tensor, weights: LowRankWeights, tokens: TokenTiles) -> torch.Tensor:
    """Add to ``out [tokens, out]`` the products of ``low``, from ``shrink``, and the second matrices, and return it."""
    b, ranks, blocks = weights.b, weights.device_ranks, weights.blocks
    assert ranks is not None
    assert blocks is not None
    launch(
        _expand, (len(blocks),),
        out, out.stride(0), len(out), low, b, b.stride(0), ranks, ranks.stride(0), tokens.tiles, tokens.used, tokens.places, blocks,
        low.shape[1],
        RANK=low.shape[2], STEP=STEP, BLOCK_M=max(16, triton.next_power_of_2(len(out))), ROW_BLOCK=ROW_BLOCK,
    )  # fmt: skip
    return out


class AdaptedRows:
    """Compute the products of one ``weight [out, in]`` with up to ``MAX_ROWS`` rows, and what their adapters add, in one kernel
    after ``shrink``."""

    def __init__(self, weight: torch.Tensor, low_rank: LowRankWeights) -> None:
        self._weight, self._low_rank = weight.detach(), low_rank
        self._space = workspace(weight.device)
        n, k = weight.shape
        # one row is computed by the kernel for several
        tiles = [tile_of(max(2, rows), n, k) for rows in range(MAX_ROWS + 1)]
        self._tiles = [tile if tile is not None and self._fits(tile) else None for tile in tiles]
        self._pairs = low_rank.parts == ((0, n // 2), (n // 2, n // 2))

    def _fits(self, tile: ProductTile) -> bool:
        """Return True if every tile of rows lies in one part."""
        parts, size = self._low_rank.parts, max(tile.block_n, ROW_BLOCK)
        whole = sum(rows for _, rows in parts) == self._weight.shape[0]
        return whole and all(start % size == 0 and rows % size == 0 for start, rows in parts)

    def can(self, tokens: TokenTiles, rows: int, *, gated: bool = False, parts: bool = False) -> bool:
        """Return True if there is a kernel for ``rows`` rows, also for the gate, or in ``parts``."""
        if tokens.places is None or rows > MAX_ROWS:
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
        tile = self._tiles[len(x)]
        assert tile is not None
        assert x.is_contiguous()
        low = shrink(x, self._low_rank, tokens, leads=True)
        return self.product(x, bias, tile, low, tokens, GATE_KINDS[gated] if gated else False, in_parts=in_parts)

    def product(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        tile: ProductTile,
        low: torch.Tensor,
        tokens: TokenTiles,
        gated: int = False,
        *,
        in_parts: bool = False,
    ) -> torch.Tensor:
        """Launch the kernel after ``shrink``, which returned ``low``."""
        (m, k), n, weights = x.shape, self._weight.shape[0], self._low_rank
        assert weights.device_ranks is not None
        if in_parts:
            y = torch.empty(tile.split, m, n, dtype=torch.float32, device=x.device)
        else:
            y = torch.empty(m, n // 2 if gated else n, dtype=x.dtype, device=x.device)
        launch(
            _adapted_rows, (triton.cdiv(n, tile.block_n), tile.split),
            x, self._weight, bias, y, self._space.parts, self._space.arrived, m, n, k, k // tile.split,
            low, weights.b, weights.b.stride(0), weights.device_ranks, weights.device_ranks.stride(0),
            tokens.tiles, tokens.used, tokens.places, weights.blocks, low.shape[1],
            GATED=gated, BIAS=bias is not None, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
            SPLIT=tile.split, IN_PARTS=in_parts, RANK=low.shape[2], STEP=STEP, ROW_BLOCK=ROW_BLOCK, AHEAD_STEPS=AHEAD_STEPS,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return y
