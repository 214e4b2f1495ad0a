"""Multiply few tokens with the low-rank matrices of their adapters, beside the product of the layer and after it.

``shrink`` computes ``x @ a.T``. It is a leader (see ``launch``): when the kernel after it starts, ``x`` is complete. The
product of the layer that follows therefore reads ``x`` at once, runs together with ``shrink``, and waits for it only
at its end (see ``adapted_rows``). ``expand`` adds the products of the results and the second matrices to what it wrote.

The time of many adapters is that of reading their matrices, each of which is needed once. Programs therefore read one
contiguous piece, and request it before they wait for the kernel before theirs. If few adapters occur (TOGETHER), the tokens of a tile are
multiplied together by tensor cores, otherwise one by one: most tiles have one token then. Programs of ``shrink`` have whole rows of
first matrices then, if they are not too long, so that none adds up the sums of others. The grids do not depend on which slots
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
from dovetail.ops.triton.sizes import cdiv, next_power_of_2

if TYPE_CHECKING:
    from dovetail.ops.activation import Activation
    from dovetail.ops.adapter_weights import LowRankWeights, TokenTiles

RANK_BLOCK: tl.constexpr = tl.constexpr(16)
"""The ranks of slots are multiples of this."""
INPUT_BLOCK = {True: 512, False: 1024}
"""The number of inputs of one program of ``shrink``, by ``few``. The last program of a tile to finish adds up the sums of all."""
OUTPUT_BLOCK = 512
"""The largest number of rows of second matrices that one program of ``expand`` reads if many adapters occur."""
EACH_SIZE, EACH_WARPS = 1 << 15, 8
"""The number of elements of first matrices that a program of ``shrink`` multiplies with one token after another, if many adapters occur, and of its warps."""
EACH_INPUTS = 8192
"""The largest number of inputs of a program that has whole rows of first matrices. Matrices with more are divided into blocks of inputs."""
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


@triton.jit(do_not_specialize_on_alignment=["ranks", "order", "tiles"])
def _shrink_each(
    x, x_stride, inputs, a, a_stride, ranks, rank_stride, order, tiles, low, num_parts,
    RANK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, LEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply the tokens of a tile one by one with ROWS rows of the first matrix of their adapter. BLOCK holds all inputs."""
    if PDL and not LEADS:
        gdc_launch_dependents()
    tile, unit = tl.program_id(0), tl.program_id(1)
    part, first = unit // (RANK // ROWS), unit % (RANK // ROWS) * ROWS
    slot = tl.load(tiles + tile * 3, cache_modifier=".cg").to(tl.int64)
    start = tl.load(tiles + tile * 3 + 1, cache_modifier=".cg")
    count = tl.load(tiles + tile * 3 + 2, cache_modifier=".cg")
    rank = tl.where(count > 0, tl.load(ranks + slot * rank_stride + part, cache_modifier=".cg"), 0)
    token = tl.load(order + start, cache_modifier=".cg").to(tl.int64)
    k, r = tl.arange(0, BLOCK), first + tl.arange(0, ROWS)
    rows = a + slot * a_stride + (part * RANK + r).to(tl.int64)[:, None] * inputs + k[None]
    weight = tl.load(rows, mask=(r < rank)[:, None] & (k < inputs)[None], other=0.0)
    if PDL:
        gdc_wait()
        if LEADS:
            gdc_launch_dependents()
    if first // RANK_BLOCK * RANK_BLOCK < rank:
        given = tl.load(x + token * x_stride + k, mask=k < inputs, other=0.0)
        for index in range(count):
            if index > 0:
                token = tl.load(order + start + index, cache_modifier=".cg").to(tl.int64)
                given = tl.load(x + token * x_stride + k, mask=k < inputs, other=0.0)
            total = tl.sum(weight.to(tl.float32) * given.to(tl.float32)[None], 1)
            tl.store(low + (token * num_parts + part) * RANK + r, total.to(low.dtype.element_ty))


@triton.jit
def _rows(address, n, end, WHOLE: tl.constexpr):
    """Return what is at ``address`` of the rows ``n`` below ``end``, which are all of them if WHOLE."""
    return tl.load(address) if WHOLE else tl.load(address, mask=n < end, other=0.0)


@triton.jit
def _matrix(rows, n, end, rank, WHOLE: tl.constexpr):
    """Return the first RANK_BLOCK columns of the rows ``n`` of a second matrix, zeros if the adapter has no rank. See ``_rows``."""
    if WHOLE:
        return tl.load(rows, mask=(rank + tl.zeros_like(n))[:, None] > 0, other=0.0)
    return tl.load(rows, mask=(n < tl.where(rank > 0, end, 0))[:, None], other=0.0)


@triton.jit
def _first_ranks(source, token, num_parts, RANK: tl.constexpr):
    """Return the first RANK_BLOCK numbers that ``shrink`` made of ``token`` for a part of which the adapter has a rank."""
    return tl.load(source + token * num_parts * RANK + tl.arange(0, RANK_BLOCK))


@triton.jit
def _products(weight, rows, source, rank, n, end, token, given, num_parts, RANK: tl.constexpr):
    """Return the products ``[rows]`` of the second matrix of one part and what ``shrink`` made of ``token``. ``weight`` has its first
    RANK_BLOCK columns, and ``given`` what ``_first_ranks`` returned."""
    total = tl.sum(weight.to(tl.float32) * given.to(tl.float32)[None], 1)
    if RANK > RANK_BLOCK:
        for first in range(RANK_BLOCK, rank, RANK_BLOCK):
            more_given = _first_ranks(source + first, token, num_parts, RANK)
            more = tl.load(rows + first, mask=(n < end)[:, None], other=0.0)
            total += tl.sum(more.to(tl.float32) * more_given.to(tl.float32)[None], 1)
    return total


@triton.jit
def _low_pair(low, token, gate_rank, up_rank, RANK: tl.constexpr):
    """Return what ``_first_ranks`` does of both parts of a gate, zeros for one of which the adapter has no rank."""
    r = tl.arange(0, RANK_BLOCK)
    source = low + token * 2 * RANK + r
    given = tl.load(source, mask=gate_rank + tl.zeros_like(r) > 0, other=0.0)
    return given, tl.load(source + RANK, mask=up_rank + tl.zeros_like(r) > 0, other=0.0)


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
    # blocks are larger than ROW_BLOCK only if all of their rows exist
    whole: tl.constexpr = BLOCK_N > ROW_BLOCK
    if PDL:
        gdc_launch_dependents()
    slot = tl.load(tiles + tile * 3, cache_modifier=".cg").to(tl.int64)
    start = tl.load(tiles + tile * 3 + 1, cache_modifier=".cg")
    count = tl.load(tiles + tile * 3 + 2, cache_modifier=".cg")
    part = tl.load(blocks + block * 3)
    row = tl.load(blocks + block * 3 + 1)
    row = tl.multiple_of(row, BLOCK_N) if whole else row
    n = row + tl.arange(0, BLOCK_N)
    end = row + BLOCK_N if whole else tl.load(blocks + block * 3 + 2)
    rank = tl.where(count > 0, tl.load(ranks + slot * rank_stride + part, cache_modifier=".cg"), 0)
    token = tl.load(order + start, cache_modifier=".cg").to(tl.int64)
    rows = b + slot * b_stride + n.to(tl.int64)[:, None] * RANK + tl.arange(0, RANK_BLOCK)[None]
    weight = _matrix(rows, n, end, rank, whole)
    if PDL:
        gdc_wait()
    source = low + part * RANK
    if rank > 0:
        if TOGETHER:
            inside, m = n < end, tl.arange(0, TILE)
            real = m < count
            tokens = tl.load(order + start + m, mask=real, other=0).to(tl.int64)
            total = _tile_products(weight, rows, source, rank, inside, tokens, real, num_parts, RANK)
            to, mask = out + tokens[:, None] * out_stride + n[None], real[:, None] & inside[None]
            tl.store(to, (tl.load(to, mask=mask).to(tl.float32) + total).to(out.dtype.element_ty), mask=mask)
        else:
            # what depends on the first token, most often the only one, is requested before the matrix is used
            given = _first_ranks(source, token, num_parts, RANK)
            before = _rows(out + token * out_stride + n, n, end, whole).to(tl.float32)
            for index in range(count):
                if index > 0:
                    token = tl.load(order + start + index).to(tl.int64)
                    given = _first_ranks(source, token, num_parts, RANK)
                    before = _rows(out + token * out_stride + n, n, end, whole).to(tl.float32)
                total = before + _products(weight, rows, source, rank, n, end, token, given, num_parts, RANK)
                tl.store(out + token * out_stride + n, total.to(out.dtype.element_ty), mask=None if whole else n < end)


@triton.jit(do_not_specialize=["m", "num_tiles"], do_not_specialize_on_alignment=["ranks", "order", "tiles", "places"])
def _expand_gate(
    x, y, m, half, low, b, b_stride, ranks, rank_stride, order, tiles, places, num_tiles,
    GATED: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Add to the gates and gated values ``x [m, 2 * half]``, and write the gate to ``y [m, half]``. The programs beyond
    ``num_tiles`` do so for tokens without an adapter."""
    n, tile = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    place = tl.where(tile < num_tiles, tile, 0) * 3
    slot = tl.load(tiles + place, cache_modifier=".cg").to(tl.int64)
    start = tl.load(tiles + place + 1, cache_modifier=".cg")
    count = tl.where(tile < num_tiles, tl.load(tiles + place + 2, cache_modifier=".cg"), 0)
    gate_rank = tl.where(count > 0, tl.load(ranks + slot * rank_stride, cache_modifier=".cg"), 0)
    up_rank = tl.where(count > 0, tl.load(ranks + slot * rank_stride + 1, cache_modifier=".cg"), 0)
    token = tl.load(order + start, cache_modifier=".cg").to(tl.int64)
    rows = b + slot * b_stride + n.to(tl.int64)[:, None] * RANK + tl.arange(0, RANK_BLOCK)[None]
    up_rows = rows + half.to(tl.int64) * RANK
    gates, ups = _matrix(rows, n, half, gate_rank, WHOLE), _matrix(up_rows, n, half, up_rank, WHOLE)
    if PDL:
        gdc_wait()
    if count > 0:
        # what depends on the first token, most often the only one, is requested before the matrices are used
        gate_given, up_given = _low_pair(low, token, gate_rank, up_rank, RANK)
        opens = _rows(x + token * 2 * half + n, n, half, WHOLE).to(tl.float32)
        up = _rows(x + token * 2 * half + n + half, n, half, WHOLE).to(tl.float32)
        for index in range(count):
            if index > 0:
                token = tl.load(order + start + index).to(tl.int64)
                gate_given, up_given = _low_pair(low, token, gate_rank, up_rank, RANK)
                opens = _rows(x + token * 2 * half + n, n, half, WHOLE).to(tl.float32)
                up = _rows(x + token * 2 * half + n + half, n, half, WHOLE).to(tl.float32)
            opens += _products(gates, rows, low, gate_rank, n, half, token, gate_given, 2, RANK)
            up += _products(ups, up_rows, low + RANK, up_rank, n, half, token, up_given, 2, RANK)
            result = gate(opens, up, GATED).to(y.dtype.element_ty)
            tl.store(y + token * half + n, result, mask=None if WHOLE else n < half)
    elif tile >= num_tiles:
        others = (tile - num_tiles) * TILE + tl.arange(0, TILE)
        real = (others < m) & (tl.load(places + others, mask=others < m, other=0) < 0)
        from_x, mask = x + others.to(tl.int64)[:, None] * 2 * half + n[None], real[:, None] & (n < half)[None]
        plain = gate(
            tl.load(from_x, mask=mask, other=0.0).to(tl.float32),
            tl.load(from_x + half, mask=mask, other=0.0).to(tl.float32),
            GATED,
        )
        to = y + others.to(tl.int64)[:, None] * half + n[None]
        tl.store(to, plain.to(y.dtype.element_ty), mask=mask)


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
    With ``leads``, the kernel is a leader (see ``launch``). Beyond the rank of an adapter, the result is 0 up
    to the next multiple of RANK_BLOCK; what else it holds there, and of tokens without an adapter, is undefined."""
    a, ranks = weights.a, weights.device_ranks
    assert ranks is not None
    assert weights.arrived is not None
    num_parts, rank, inputs = a.shape[1:]
    together = tokens.adapters <= AdapterCount.FEW
    low = torch.empty(len(x), num_parts, rank, dtype=x.dtype, device=x.device)
    block = next_power_of_2(inputs)
    if not together and block <= EACH_INPUTS and 4 * inputs >= 3 * block:
        rows = min(RANK_BLOCK.value, EACH_SIZE // block)
        launch(
            _shrink_each, (len(tokens.tiles), num_parts * (rank // rows)),
            x, x.stride(0), inputs, a, a.stride(0), ranks, ranks.stride(0), tokens.order, tokens.tiles, low, num_parts,
            RANK=rank, ROWS=rows, BLOCK=block, LEADS=leads, num_stages=1, num_warps=EACH_WARPS,
        )  # fmt: skip
        return low
    block = INPUT_BLOCK[together]
    splits, units = cdiv(inputs, block), num_parts * (rank // RANK_BLOCK.value)
    num_tiles = len(tokens.tiles)
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
    block = OUTPUT_BLOCK // 2
    launch(
        _expand_gate, (cdiv(n // 2, block), num_tiles + cdiv(m, tokens.size)),
        x, y, m, n // 2, low, b, b.stride(0), ranks, ranks.stride(0), tokens.order, tokens.tiles, tokens.places, num_tiles,
        GATED=GATE_KINDS[activation], RANK=low.shape[2], TILE=tokens.size, BLOCK_N=block, WHOLE=n // 2 % block == 0,
    )  # fmt: skip
    return y
