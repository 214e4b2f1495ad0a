"""Multiply few tokens with the low-rank matrices of their adapters, beside the product of the layer and after it.

``shrink`` computes ``x @ a.T``. It is a leader (see ``launch``): when the kernel after it starts, ``x`` is complete. The
product of the layer that follows therefore reads ``x`` at once, runs together with ``shrink``, and waits for it only
at its end (see ``adapted_rows``). ``expand`` adds the products of the results and the second matrices to what it wrote.

The time of many adapters is that of reading their matrices, each of which is needed once. Programs therefore read one
contiguous piece, and request it before they wait for the kernel before theirs. If few adapters occur (TOGETHER), the tokens of a tile are
multiplied together by tensor cores, otherwise one by one: most tiles have one token then. The grids do not depend on which slots
occur, so that they can be captured: programs of tiles that pad end at once.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.adapter_weights import AdapterCount
from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.low_rank import ROW_BLOCK
from dovetail.ops.triton.matmul import GATE_KINDS, gate

if TYPE_CHECKING:
    from dovetail.ops.activation import Activation
    from dovetail.ops.adapter_weights import LowRankWeights, TokenTiles

RANK_BLOCK: tl.constexpr = tl.constexpr(16)
"""The ranks of slots are multiples of this."""
INPUT_BLOCK = {True: 512, False: 1024}
"""The number of inputs of one program of ``shrink``, by ``few``. The last program of a tile to finish adds up the sums of all."""
OUTPUT_BLOCK = 512
"""The largest number of rows of second matrices that one program of ``expand`` reads if many adapters occur."""
MAX_SUMS = 1 << 15


@triton.jit(do_not_specialize_on_alignment=["ranks", "order", "tiles"])
def _shrink(
    x, x_stride, inputs, a, a_stride, ranks, rank_stride, order, tiles, low, sums, arrived, num_parts,
    TOGETHER: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, INPUT_BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    LEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL and not LEADS:
        gdc_launch_dependents()
    tile, unit, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    part, first = unit // (RANK // RANK_BLOCK), unit % (RANK // RANK_BLOCK) * RANK_BLOCK
    slot = tl.load(tiles + tile * 3, cache_modifier=".cg").to(tl.int64)
    start = tl.load(tiles + tile * 3 + 1, cache_modifier=".cg")
    count = tl.load(tiles + tile * 3 + 2, cache_modifier=".cg")
    rank = tl.where(count > 0, tl.load(ranks + slot * rank_stride + part, cache_modifier=".cg"), 0)
    k = split * INPUT_BLOCK + tl.arange(0, INPUT_BLOCK)
    m, r = tl.arange(0, TILE), tl.arange(0, RANK_BLOCK)
    rows = a + slot * a_stride + (part * RANK + first + r).to(tl.int64)[:, None] * inputs + k[None]
    weight = tl.load(rows, mask=(k < tl.where(first < rank, inputs, 0))[None], other=0.0)
    real = m < count
    token = tl.load(order + start + m, mask=real, other=0, cache_modifier=".cg").to(tl.int64)
    if PDL:
        gdc_wait()
        if LEADS:
            gdc_launch_dependents()
    if first < rank:
        at = tile * tl.num_programs(1) + unit
        mine = sums + at.to(tl.int64) * (SPLITS * TILE * RANK_BLOCK) + m[:, None] * RANK_BLOCK + r[None]
        total = tl.zeros([TILE, RANK_BLOCK], tl.float32)
        if TOGETHER:
            given = tl.load(
                x + token[:, None] * x_stride + k[None], mask=real[:, None] & (k < inputs)[None], other=0.0
            )  # fmt: skip
            total = tl.dot(given, tl.trans(weight), input_precision="ieee")
            if SPLITS > 1:
                tl.store(mine + split * TILE * RANK_BLOCK, total, mask=real[:, None])
        else:
            place = sums + ((at.to(tl.int64) * SPLITS + split) * TILE) * RANK_BLOCK + r
            for index in range(count):
                one = tl.load(order + start + index, cache_modifier=".cg").to(tl.int64)
                given = tl.load(x + one * x_stride + k, mask=k < inputs, other=0.0)
                tl.store(place + index * RANK_BLOCK, tl.sum(weight.to(tl.float32) * given.to(tl.float32)[None], 1))
        finished = SPLITS == 1
        if SPLITS > 1:
            tl.debug_barrier()
            finished = tl.atomic_add(arrived + at, 1, sem="acq_rel") == SPLITS - 1
        elif not TOGETHER:
            tl.debug_barrier()
        if finished:
            if SPLITS > 1 or not TOGETHER:
                total = tl.zeros([TILE, RANK_BLOCK], tl.float32)
                for other in tl.static_range(SPLITS):
                    total += tl.load(
                        mine + other * TILE * RANK_BLOCK, mask=real[:, None], other=0.0, cache_modifier=".cg"
                    )
            if SPLITS > 1:
                tl.store(arrived + at, 0)
            to = low + (token * num_parts + part)[:, None] * RANK + (first + r)[None]
            total = tl.where((first + r < rank)[None], total, 0.0)
            tl.store(to, total.to(low.dtype.element_ty), mask=real[:, None])


@triton.jit
def _products(weight, rows, source, rank, inside, token, num_parts, RANK: tl.constexpr):
    """Return the products ``[rows]`` of the second matrix of one part and what ``shrink`` made of ``token``. ``weight`` has its first
    RANK_BLOCK columns."""
    r = tl.arange(0, RANK_BLOCK)
    given = tl.load(source + token * num_parts * RANK + r, mask=r < rank, other=0.0)
    total = tl.sum(weight.to(tl.float32) * given.to(tl.float32)[None], 1)
    if RANK > RANK_BLOCK:
        for first in range(RANK_BLOCK, rank, RANK_BLOCK):
            given = tl.load(source + token * num_parts * RANK + first + r, mask=first + r < rank, other=0.0)
            more = tl.load(rows + first, mask=inside[:, None], other=0.0)
            total += tl.sum(more.to(tl.float32) * given.to(tl.float32)[None], 1)
    return total


@triton.jit
def _tile_products(weight, rows, source, rank, inside, token, real, num_parts, RANK: tl.constexpr):
    """Return what ``_products`` does for each ``token`` of a tile, ``[tokens, rows]``."""
    r = tl.arange(0, RANK_BLOCK)
    from_low = source + (token * num_parts * RANK)[:, None] + r[None]
    given = tl.load(from_low, mask=real[:, None] & (r < rank)[None], other=0.0)
    total = tl.dot(given, tl.trans(weight), input_precision="ieee")
    if RANK > RANK_BLOCK:
        for first in range(RANK_BLOCK, rank, RANK_BLOCK):
            given = tl.load(from_low + first, mask=real[:, None] & (first + r < rank)[None], other=0.0)
            more = tl.load(rows + first, mask=inside[:, None], other=0.0)
            total = tl.dot(given, tl.trans(more), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize_on_alignment=["ranks", "order", "tiles", "blocks"])
def _expand(
    out, out_stride, low, b, b_stride, ranks, rank_stride, order, tiles, blocks, num_parts,
    TOGETHER: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr, ROW_BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    block, tile = tl.program_id(0) * (BLOCK_N // ROW_BLOCK), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    slot = tl.load(tiles + tile * 3, cache_modifier=".cg").to(tl.int64)
    start = tl.load(tiles + tile * 3 + 1, cache_modifier=".cg")
    count = tl.load(tiles + tile * 3 + 2, cache_modifier=".cg")
    part = tl.load(blocks + block * 3)
    row = tl.load(blocks + block * 3 + 1)
    n = row + tl.arange(0, BLOCK_N)
    # blocks are larger than ROW_BLOCK only if all of their rows exist
    end = tl.load(blocks + block * 3 + 2) if BLOCK_N == ROW_BLOCK else row + BLOCK_N
    inside = n < end
    rank = tl.where(count > 0, tl.load(ranks + slot * rank_stride + part, cache_modifier=".cg"), 0)
    rows = b + slot * b_stride + n.to(tl.int64)[:, None] * RANK + tl.arange(0, RANK_BLOCK)[None]
    weight = tl.load(rows, mask=(n < tl.where(rank > 0, end, 0))[:, None], other=0.0)
    if PDL:
        gdc_wait()
    source = low + part * RANK
    if rank > 0:
        if TOGETHER:
            m = tl.arange(0, TILE)
            real = m < count
            token = tl.load(order + start + m, mask=real, other=0).to(tl.int64)
            total = _tile_products(weight, rows, source, rank, inside, token, real, num_parts, RANK)
            to, mask = out + token[:, None] * out_stride + n[None], real[:, None] & inside[None]
            tl.store(to, (tl.load(to, mask=mask).to(tl.float32) + total).to(out.dtype.element_ty), mask=mask)
        else:
            for index in range(count):
                one = tl.load(order + start + index).to(tl.int64)
                total = _products(weight, rows, source, rank, inside, one, num_parts, RANK)
                to = out + one * out_stride + n
                tl.store(to, (tl.load(to, mask=inside).to(tl.float32) + total).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["m", "num_tiles"], do_not_specialize_on_alignment=["ranks", "order", "tiles", "places"])
def _expand_gate(
    x, y, m, half, low, b, b_stride, ranks, rank_stride, order, tiles, places, num_tiles,
    GATED: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Add to the gates and gated values ``x [m, 2 * half]``, and write the gate to ``y [m, half]``. The programs beyond
    ``num_tiles`` do so for tokens without an adapter."""
    n, tile = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1)
    inside = n < half
    if PDL:
        gdc_launch_dependents()
    place = tl.where(tile < num_tiles, tile, 0) * 3
    slot = tl.load(tiles + place, cache_modifier=".cg").to(tl.int64)
    start = tl.load(tiles + place + 1, cache_modifier=".cg")
    count = tl.where(tile < num_tiles, tl.load(tiles + place + 2, cache_modifier=".cg"), 0)
    gate_rank = tl.where(count > 0, tl.load(ranks + slot * rank_stride, cache_modifier=".cg"), 0)
    up_rank = tl.where(count > 0, tl.load(ranks + slot * rank_stride + 1, cache_modifier=".cg"), 0)
    gate_rows = b + slot * b_stride + n.to(tl.int64)[:, None] * RANK + tl.arange(0, RANK_BLOCK)[None]
    up_rows = gate_rows + half.to(tl.int64) * RANK
    gate_weight = tl.load(gate_rows, mask=(n < tl.where(gate_rank > 0, half, 0))[:, None], other=0.0)
    up_weight = tl.load(up_rows, mask=(n < tl.where(up_rank > 0, half, 0))[:, None], other=0.0)
    if PDL:
        gdc_wait()
    t = tl.arange(0, TILE)
    if count > 0:
        for index in range(count):
            token = tl.load(order + start + index).to(tl.int64)
            opens = _products(gate_weight, gate_rows, low, gate_rank, inside, token, 2, RANK)
            up = _products(up_weight, up_rows, low + RANK, up_rank, inside, token, 2, RANK)
            given = x + token * 2 * half + n
            opens += tl.load(given, mask=inside, other=0.0).to(tl.float32)
            up += tl.load(given + half, mask=inside, other=0.0).to(tl.float32)
            tl.store(y + token * half + n, gate(opens, up, GATED).to(y.dtype.element_ty), mask=inside)
    elif tile >= num_tiles:
        token = (tile - num_tiles) * TILE + t
        real = (token < m) & (tl.load(places + token, mask=token < m, other=0) < 0)
        given, mask = x + token.to(tl.int64)[:, None] * 2 * half + n[None], real[:, None] & inside[None]
        opens = tl.load(given, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(given + half, mask=mask, other=0.0).to(tl.float32)
        to = y + token.to(tl.int64)[:, None] * half + n[None]
        tl.store(to, gate(opens, up, GATED).to(y.dtype.element_ty), mask=mask)


def arrivals(device: torch.device) -> torch.Tensor:
    """Return new counters of ``shrink`` (``LowRankWeights.arrived``). The product that runs at the same time has its own
    (``matmul.Workspace``)."""
    return torch.zeros(MAX_SUMS, dtype=torch.int32, device=device)


@functools.cache
def output_block(parts: tuple[tuple[int, int], ...], *, few: bool) -> int:
    """Return the number of rows of a program of ``expand``: as many as divide all ``parts`` if not ``few`` adapters occur, or
    ROW_BLOCK."""
    block = ROW_BLOCK if few else OUTPUT_BLOCK
    while block > ROW_BLOCK and any(start % block or size % block for start, size in parts):
        block //= 2
    return block


def shrink(x: torch.Tensor, weights: LowRankWeights, tokens: TokenTiles, *, leads: bool = False) -> torch.Tensor:
    """Return ``[tokens, parts, rank]``: the products of ``x [tokens, in]`` and the first matrices of the adapters of the tokens.
    With ``leads``, the kernel is a leader (see ``launch``). What the result holds of tokens without an adapter, and beyond the ranks of the adapters, is undefined."""
    a, ranks = weights.a, weights.device_ranks
    assert ranks is not None
    assert weights.arrived is not None
    num_parts, rank, inputs = a.shape[1:]
    together = tokens.adapters <= AdapterCount.FEW
    block = INPUT_BLOCK[together]
    splits, units = triton.cdiv(inputs, block), num_parts * (rank // RANK_BLOCK.value)
    num_tiles = len(tokens.tiles)
    low = torch.empty(len(x), num_parts, rank, dtype=x.dtype, device=x.device)
    assert num_tiles * units <= MAX_SUMS
    sums = torch.empty(
        num_tiles * units * splits * tokens.size * RANK_BLOCK.value, dtype=torch.float32, device=x.device
    )
    launch(
        _shrink, (num_tiles, units, splits),
        x, x.stride(0), inputs, a, a.stride(0), ranks, ranks.stride(0), tokens.order, tokens.tiles, low, sums,
        weights.arrived, num_parts,
        TOGETHER=together, RANK=rank, TILE=tokens.size, INPUT_BLOCK=block, SPLITS=splits, LEADS=leads, num_stages=1,
    )  # fmt: skip
    return low


def expand(out: torch.Tensor, low: torch.Tensor, weights: LowRankWeights, tokens: TokenTiles) -> torch.Tensor:
    """Add to ``out [tokens, out]`` the products of ``low``, from ``shrink``, and the second matrices, and return it."""
    b, ranks, blocks = weights.b, weights.device_ranks, weights.blocks
    assert ranks is not None
    assert blocks is not None
    together = tokens.adapters <= AdapterCount.FEW
    size = output_block(weights.parts, few=together)
    launch(
        _expand, (len(blocks) * ROW_BLOCK // size, len(tokens.tiles)),
        out, out.stride(0), low, b, b.stride(0), ranks, ranks.stride(0), tokens.order, tokens.tiles, blocks, low.shape[1],
        TOGETHER=together, RANK=low.shape[2], TILE=tokens.size, BLOCK_N=size, ROW_BLOCK=ROW_BLOCK,
    )  # fmt: skip
    return out


def expand_gate(
    x: torch.Tensor, low: torch.Tensor, weights: LowRankWeights, tokens: TokenTiles, activation: Activation
) -> torch.Tensor:
    """Return the gate ``[tokens, out / 2]`` of what ``expand`` makes of contiguous ``x [tokens, out]``, whose parts are the gates and the
    gated values."""
    b, ranks = weights.b, weights.device_ranks
    assert ranks is not None
    (m, n), num_tiles = x.shape, len(tokens.tiles)
    y = torch.empty(m, n // 2, dtype=x.dtype, device=x.device)
    launch(
        _expand_gate, (triton.cdiv(n // 2, OUTPUT_BLOCK // 2), num_tiles + triton.cdiv(m, tokens.size)),
        x, y, m, n // 2, low, b, b.stride(0), ranks, ranks.stride(0), tokens.order, tokens.tiles, tokens.places, num_tiles,
        GATED=GATE_KINDS[activation], RANK=low.shape[2], TILE=tokens.size, BLOCK_N=OUTPUT_BLOCK // 2,
    )  # fmt: skip
    return y
