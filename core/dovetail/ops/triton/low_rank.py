"""Multiply tokens with the low-rank matrices of their adapters: tokens of one adapter are multiplied together.

The first kernel computes ``x @ a.T`` and the second adds the result times ``b.T`` to the output. Both run over tiles of
tokens that have the same slot. Their grids do not depend on which slots occur, so that they can be captured: tiles of a
graph that a step does not need have no tokens, and their programs end at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.sizes import cdiv, next_power_of_2

if TYPE_CHECKING:
    from dovetail.ops.adapter_weights import EmbeddingLowRank, LowRankWeights, TokenTiles

RANK_BLOCK = 16
ROW_BLOCK = 64
INPUT_BLOCK = 128
SPLIT_INPUTS = 1024
"""The number of inputs of one program of the first kernel: the sums of several programs are added up by the second, in a
fixed order."""


@triton.jit(do_not_specialize_on_alignment=["ranks", "order", "tiles"])
def _shrink(
    x, x_stride, inputs, a, a_stride, ranks, rank_stride, order, tiles, low, tokens, num_parts,
    RANK: tl.constexpr, TILE: tl.constexpr, RANK_BLOCK: tl.constexpr, INPUT_BLOCK: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.program_id(0)
    blocks = RANK // RANK_BLOCK
    part = tl.program_id(1) // blocks
    first = (tl.program_id(1) % blocks) * RANK_BLOCK
    split = tl.program_id(2)
    slot = tl.load(tiles + tile * 3).to(tl.int64)
    start = tl.load(tiles + tile * 3 + 1)
    count = tl.load(tiles + tile * 3 + 2)
    rank = tl.load(ranks + slot * rank_stride + part)
    if (count > 0) & (first < rank):
        m = tl.arange(0, TILE)
        token = tl.load(order + start + m, mask=m < count, other=0).to(tl.int64)
        r = first + tl.arange(0, RANK_BLOCK)
        rows = a + slot * a_stride + (part * RANK + r).to(tl.int64)[:, None] * inputs
        total = tl.zeros((TILE, RANK_BLOCK), tl.float32)
        for at in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, inputs), INPUT_BLOCK):
            k = at + tl.arange(0, INPUT_BLOCK)
            inside = k < inputs
            given = tl.load(
                x + token[:, None] * x_stride + k[None], mask=(m < count)[:, None] & inside[None], other=0.0
            )
            weight = tl.load(rows + k[None], mask=inside[None], other=0.0)
            total = tl.dot(given, tl.trans(weight), total, input_precision="ieee")
        to = low + ((split * tokens + token) * num_parts + part)[:, None] * RANK + r[None]
        tl.store(to, total, mask=(m < count)[:, None])


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["ranks", "order", "tiles", "blocks"])
def _expand(
    out, out_stride, low, tokens, num_parts, b, b_stride, ranks, rank_stride, order, tiles, blocks,
    RANK: tl.constexpr, TILE: tl.constexpr, RANK_BLOCK: tl.constexpr, ROW_BLOCK: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.program_id(0)
    block = tl.program_id(1)
    slot = tl.load(tiles + tile * 3).to(tl.int64)
    start = tl.load(tiles + tile * 3 + 1)
    count = tl.load(tiles + tile * 3 + 2)
    part = tl.load(blocks + block * 3)
    n = tl.load(blocks + block * 3 + 1) + tl.arange(0, ROW_BLOCK)
    inside = n < tl.load(blocks + block * 3 + 2)
    rank = tl.load(ranks + slot * rank_stride + part)
    if (count > 0) & (rank > 0):
        m = tl.arange(0, TILE)
        token = tl.load(order + start + m, mask=m < count, other=0).to(tl.int64)
        total = tl.zeros((TILE, ROW_BLOCK), tl.float32)
        for at in range(0, rank, RANK_BLOCK):
            r = at + tl.arange(0, RANK_BLOCK)
            used = (m < count)[:, None] & (r < rank)[None]
            place = low + (token * num_parts + part)[:, None] * RANK + r[None]
            given = tl.load(place, mask=used, other=0.0)
            for split in tl.static_range(1, SPLITS):
                given += tl.load(place + split * tokens.to(tl.int64) * num_parts * RANK, mask=used, other=0.0)
            weight = tl.load(
                b + slot * b_stride + n.to(tl.int64)[:, None] * RANK + r[None],
                mask=inside[:, None] & (r < rank)[None],
                other=0.0,
            )
            total = tl.dot(given.to(weight.dtype), tl.trans(weight), total, input_precision="ieee")
        place = out + token[:, None] * out_stride + n[None]
        real = (m < count)[:, None] & inside[None]
        before = tl.load(place, mask=real, other=0.0).to(tl.float32)
        tl.store(place, before + total, mask=real)


def add_low_rank(out: torch.Tensor, x: torch.Tensor, weights: LowRankWeights, tokens: TokenTiles) -> torch.Tensor:
    """Compute ``dovetail.ops.low_rank.add_low_rank`` for ``tokens``."""
    a, ranks = weights.a, weights.device_ranks
    assert ranks is not None
    num_parts, rank, inputs = a.shape[1:]
    splits = cdiv(inputs, SPLIT_INPUTS)
    low = torch.empty(splits, len(x), num_parts, rank, dtype=torch.float32, device=x.device)
    grid = (len(tokens.tiles), num_parts * (rank // RANK_BLOCK), splits)
    launch(
        _shrink, grid, x, x.stride(0), inputs, a, a.stride(0), ranks, ranks.stride(0), tokens.order, tokens.tiles, low, len(x), num_parts,
        RANK=rank, TILE=tokens.size, RANK_BLOCK=RANK_BLOCK, INPUT_BLOCK=INPUT_BLOCK, SPLIT=SPLIT_INPUTS,
    )  # fmt: skip
    return _expanded(out, low, weights, tokens)


def _expanded(out: torch.Tensor, low: torch.Tensor, weights: LowRankWeights, tokens: TokenTiles) -> torch.Tensor:
    """Add the products of ``low``, float32 ``[splits, tokens, parts, rank]`` to be added up, and the second matrices."""
    b, ranks, blocks = weights.b, weights.device_ranks, weights.blocks
    assert ranks is not None
    assert blocks is not None
    splits, count, num_parts, rank = low.shape
    launch(
        _expand, (len(tokens.tiles), len(blocks)),
        out, out.stride(0), low, count, num_parts, b, b.stride(0), ranks, ranks.stride(0), tokens.order, tokens.tiles, blocks,
        RANK=rank, TILE=tokens.size, RANK_BLOCK=RANK_BLOCK, ROW_BLOCK=ROW_BLOCK, SPLITS=splits,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=["ranks", "places", "tiles"])
def _look_up(
    ids, a, a_stride, ranks, rank_stride, places, tiles, low, RANK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(places + token)
    row = tl.load(ids + token)
    if place >= 0:
        slot = tl.load(tiles + place * 3).to(tl.int64)
        rank = tl.load(ranks + slot * rank_stride)
        r = tl.arange(0, BLOCK)
        found = tl.load(a + slot * a_stride + row * RANK + r, r < rank, 0.0)
        tl.store(low + token * RANK + r, found.to(low.dtype.element_ty), r < RANK)


def add_embedding(
    out: torch.Tensor, token_ids: torch.Tensor, weights: EmbeddingLowRank, tokens: TokenTiles
) -> torch.Tensor:
    """Compute ``dovetail.ops.low_rank.add_embedding`` for ``tokens``."""
    a, ranks, count = weights.a, weights.device_ranks, len(token_ids)
    assert ranks is not None
    rank = a.shape[2]
    low = torch.empty(1, count, 1, rank, dtype=torch.float32, device=out.device)
    launch(
        _look_up, (count,),
        token_ids, a, a.stride(0), ranks, ranks.stride(0), tokens.places, tokens.tiles, low,
        RANK=rank, BLOCK=next_power_of_2(rank), num_warps=1,
    )  # fmt: skip
    return _expanded(out, low, weights, tokens)


def row_blocks(parts: tuple[tuple[int, int], ...], device: torch.device) -> torch.Tensor:
    """Return ``LowRankWeights.blocks`` of ``parts``."""
    found = [
        (part, at, min(at + ROW_BLOCK, start + size))
        for part, (start, size) in enumerate(parts)
        for at in range(start, start + size, ROW_BLOCK)
    ]
    return torch.tensor(found, dtype=torch.int32, device=device)
