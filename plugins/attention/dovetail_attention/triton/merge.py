"""Merge the results of a query for several chunks of its keys, weighted by the sums of exponentials (arXiv
2501.01005)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.sizes import cdiv, next_power_of_2
from dovetail_attention.triton.attend import PartialResults
from dovetail_attention.triton.schedule import TOKEN, Schedule

PARTS, PARTS_OF_FEW = 8, 16
"""The number of chunks that are read at a time. ``PARTS_OF_FEW`` is for few queries, whose keys are cut into many
chunks: it is a tenth faster on H200."""
FEW = 64
"""The largest number of queries for which ``PARTS_OF_FEW`` was seen to be faster: a verify step of a few rows. Steps
with more queries have a few chunks for each."""
PIECE = 128
"""The number of elements of a value that a program merges if values have more than 256, as latents have. Their heads are
few for the device, if one row has all chunks."""
LONG_FEW, LONG_MANY = 1 << 14, 1 << 21
"""Bounds of the number of elements of the values of all queries and heads. Up to the first and from the second on,
``_merge_long`` merges values of more than 256 elements: on H200 one row of 16 heads over 131,072 latents takes 55 us
instead of 63, and 256 rows over 1,024, of which few have something to merge, 95 instead of 112. Between the bounds
``_merge`` is up to 8 % faster."""
FEW_SIZES, MANY_SIZES = (1, 32, 128, 8), (16, 128, 2, 0)
"""The numbers of heads, of elements of their values, of partial results and of further partial results that a program of ``_merge_long``
reads at a time, up to the first bound and from the second on. With the further ones, those of a single row are read at once: H200 has 132
multiprocessors. A program that reads 256 needs twice as many registers, and starts later."""


@triton.jit
def _where(info):
    """Return base, stride and number of the chunks of a query."""
    return (
        tl.load(info, cache_modifier=".cg"),
        tl.load(info + 1, cache_modifier=".cg"),
        tl.load(info + 2, cache_modifier=".cg"),
    )


@triton.jit
def _fold(
    top, total, acc, partial, lse, base, stride, chunks, member, head, at,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    for start in range(0, chunks, PARTS):
        chunk = start + tl.arange(0, PARTS)
        row = (base + member + chunk * stride).to(tl.int64) * KV_HEADS + head
        sums = tl.load(lse + row, chunk < chunks, float("-inf"))
        higher = tl.maximum(top, tl.max(sums, 0))
        shrink, weights = tl.exp2(top - higher), tl.exp2(sums - higher)
        mask = (chunk < chunks)[:, None] & (at < DIM)[None, :]
        found = tl.load(partial + row[:, None] * DIM + at[None, :], mask, 0.0)
        found = tl.where((sums > float("-inf"))[:, None], weights[:, None] * found, 0.0)  # without keys it may be NaN
        acc = acc * shrink + tl.sum(found, 0)
        total = total * shrink + tl.sum(weights, 0)
        top = higher
    return top, total, acc


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=["sinks"])
def _merge(
    out, own, own_lse, own_tokens, shared, shared_lse, shared_tokens, sinks, first,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
    PARTS: tl.constexpr, TOKEN: tl.constexpr, SHARED: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    pair = tl.program_id(0) // PIECES
    q_head = pair % (KV_HEADS * GROUP)
    token = first + pair // (KV_HEADS * GROUP)
    at = tl.program_id(0) % PIECES * BLOCK + tl.arange(0, BLOCK)
    head, member = q_head // GROUP, q_head % GROUP
    base, stride, chunks = _where(own_tokens + token * TOKEN)  # before the wait: see leaders in ``launch``
    if PDL:
        gdc_wait()
    if SHARED or chunks > 1:  # the result of a single chunk is already in place
        top, total, acc = -1e30, 0.0, tl.zeros([BLOCK], tl.float32)
        if SINKS:
            top, total = tl.load(sinks + q_head).to(tl.float32) * 1.4426950408889634, 1.0
        top, total, acc = _fold(
            top, total, acc, own, own_lse, base, stride, chunks, member, head, at, KV_HEADS, DIM, PARTS
        )
        if SHARED:
            base, stride, chunks = _where(shared_tokens + token * TOKEN)
            top, total, acc = _fold(
                top, total, acc, shared, shared_lse, base, stride, chunks, member, head, at, KV_HEADS, DIM, PARTS
            )
        to = out + (token.to(tl.int64) * (KV_HEADS * GROUP) + q_head) * DIM + at
        tl.store(to, (acc / tl.where(total > 0, total, 1.0)).to(out.dtype.element_ty), at < DIM)


@triton.jit
def _read(partial, lse, base, stride, chunk, chunks, head, real, at, DIM: tl.constexpr):
    """Return the log-sum-exps ``[chunk, head]`` and the results ``[chunk, head, at]`` of several heads that read one key head."""
    row = (base + chunk * stride).to(tl.int64)[:, None] + head[None, :]
    there = (chunk < chunks)[:, None] & real[None, :]
    sums = tl.load(lse + row, there, float("-inf"))
    mask = there[:, :, None] & (at < DIM)[None, None, :]
    return sums, tl.load(partial + row[:, :, None] * DIM + at[None, None, :], mask, 0.0)


@triton.jit
def _weighted(sums, found, top):
    """Return the sums of ``_read``'s weights and of its weighted results."""
    weights = tl.exp2(sums - top[None, :])
    found = tl.where((sums > float("-inf"))[:, :, None], weights[:, :, None] * found, 0.0)
    return tl.sum(weights, 0), tl.sum(found, 0)


@triton.jit
def _add(
    top, total, acc, partial, lse, base, stride, chunks, head, real, at,
    DIM: tl.constexpr, PARTS: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """Do what ``_fold`` does, for several heads that read one key head."""
    for start in range(0, chunks, PARTS + MORE):
        sums, found = _read(partial, lse, base, stride, start + tl.arange(0, PARTS), chunks, head, real, at, DIM)
        higher = tl.maximum(top, tl.max(sums, 0))
        if MORE:
            chunk = start + PARTS + tl.arange(0, MORE)
            more_sums, more_found = _read(partial, lse, base, stride, chunk, chunks, head, real, at, DIM)
            higher = tl.maximum(higher, tl.max(more_sums, 0))
        shrink = tl.exp2(top - higher)
        own_total, own_acc = _weighted(sums, found, higher)
        total, acc, top = total * shrink + own_total, acc * shrink[:, None] + own_acc, higher
        if MORE:
            own_total, own_acc = _weighted(more_sums, more_found, higher)
            total, acc = total + own_total, acc + own_acc
    return top, total, acc


@triton.jit(do_not_specialize=["first"])
def _merge_long(
    out, own, own_lse, own_tokens, shared, shared_lse, shared_tokens, first,
    HEADS: tl.constexpr, DIM: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    MORE: tl.constexpr, TOKEN: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Merge what ``SHARE`` heads of a query have, all of which read one key head, in ``BLOCK`` elements of values."""
    if PDL:
        gdc_launch_dependents()
    pieces: tl.constexpr = (DIM + BLOCK - 1) // BLOCK
    programs: tl.constexpr = (HEADS + SHARE - 1) // SHARE * pieces
    token, part = first + tl.program_id(0) // programs, tl.program_id(0) % programs
    head = part // pieces * SHARE + tl.arange(0, SHARE)
    at = part % pieces * BLOCK + tl.arange(0, BLOCK)
    base, stride, chunks = _where(own_tokens + token * TOKEN)  # before the wait: see leaders in ``launch``
    if PDL:
        gdc_wait()
    if SHARED or chunks > 1:  # the result of a single chunk is already in place
        top, total = tl.full([SHARE], -1e30, tl.float32), tl.zeros([SHARE], tl.float32)
        acc, real = tl.zeros([SHARE, BLOCK], tl.float32), head < HEADS
        top, total, acc = _add(top, total, acc, own, own_lse, base, stride, chunks, head, real, at, DIM, PARTS, MORE)
        if SHARED:
            base, stride, chunks = _where(shared_tokens + token * TOKEN)
            top, total, acc = _add(
                top, total, acc, shared, shared_lse, base, stride, chunks, head, real, at, DIM, PARTS, MORE
            )
        result = (acc / tl.where(total > 0, total, 1.0)[:, None]).to(out.dtype.element_ty)
        to = out + (token.to(tl.int64) * HEADS + head)[:, None] * DIM + at[None, :]
        tl.store(to, result, real[:, None] & (at < DIM)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _merge_into(
    out, lse, partial, part_lse, tokens, rows,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    TOKEN: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    q_head = tl.program_id(0) % (KV_HEADS * GROUP)
    token = tl.program_id(0) // (KV_HEADS * GROUP)
    head, member = q_head // GROUP, q_head % GROUP
    base, stride, chunks = _where(tokens + token * TOKEN)  # before the wait
    if PDL:
        gdc_wait()
    if chunks > 0:
        at = tl.arange(0, BLOCK)
        place = out + (token.to(tl.int64) * (KV_HEADS * GROUP) + q_head) * DIM + at
        acc = tl.load(place, at < DIM, 0.0).to(tl.float32)
        top = tl.maximum(tl.load(lse + q_head * rows + token) * 1.4426950408889634, -1e30)
        total = tl.full([], 1.0, tl.float32)
        top, total, acc = _fold(
            top, total, acc, partial, part_lse, base, stride, chunks, member, head, at, KV_HEADS, DIM, PARTS
        )
        tl.store(place, (acc / total).to(out.dtype.element_ty), at < DIM)


def merge_into(out: torch.Tensor, lse: torch.Tensor, schedule: Schedule, partial: PartialResults) -> None:
    """Merge the partial results of ``schedule`` into ``out [tokens, heads, dim]``. Mutates ``out``.

    ``lse [heads, tokens]`` are the log-sum-exps of ``out``. Queries that have no chunk are left as they are.
    """
    rows, heads, dim = out.shape
    kv_heads = partial.lse.shape[1]
    launch(
        _merge_into, (rows * heads,),
        out, lse, *partial, schedule.tokens, rows,
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim, BLOCK=next_power_of_2(dim), PARTS=PARTS, TOKEN=TOKEN,
        num_warps=2,
    )  # fmt: skip


def merge(
    out: torch.Tensor,
    tokens: range,
    parts: list[tuple[Schedule, PartialResults]],
    sinks: torch.Tensor | None,
    *,
    one_by_one: bool = False,
) -> None:
    """Write the rows ``tokens`` of ``out [tokens, heads, dim]`` that have several chunks. Mutates ``out``.

    With two ``parts``, one for own keys and one for shared keys, write all of these rows. With ``one_by_one``, chunks
    are added in their order, by the arithmetic of ``attend``.
    """
    (schedule, partial), (schedule_s, partial_s) = parts[0], parts[-1]
    heads, dim = out.shape[1:]
    kv_heads = partial.lse.shape[1]
    elements = len(tokens) * heads * dim
    long = dim > 2 * PIECE and kv_heads == 1 and sinks is None and not one_by_one
    if long and not LONG_FEW < elements < LONG_MANY:
        _launch_long(out, tokens, parts, *(FEW_SIZES if elements <= LONG_FEW else MANY_SIZES))
        return
    size = PIECE if dim > 2 * PIECE else next_power_of_2(dim)
    pieces = cdiv(dim, size)
    few = PARTS_OF_FEW if pieces == 1 else 2 * PARTS_OF_FEW
    at_a_time = 1 if one_by_one else few if len(tokens) <= FEW else PARTS
    launch(
        _merge, (len(tokens) * heads * pieces,),
        out, *partial, schedule.tokens, *partial_s, schedule_s.tokens, out if sinks is None else sinks, tokens.start,
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim, BLOCK=size, PIECES=pieces, PARTS=at_a_time, TOKEN=TOKEN,
        SHARED=len(parts) > 1, SINKS=sinks is not None, num_warps=2, as_written=one_by_one,
    )  # fmt: skip


def _launch_long(
    out: torch.Tensor,
    tokens: range,
    parts: list[tuple[Schedule, PartialResults]],
    share: int,
    block: int,
    at_a_time: int,
    more: int,
) -> None:
    """Launch ``_merge_long`` with programs that write ``block`` elements of the values of ``share`` heads, and read ``at_a_time``
    and ``more`` partial results at a time."""
    (schedule, partial), (schedule_s, partial_s) = parts[0], parts[-1]
    heads, dim = out.shape[1:]
    launch(
        _merge_long, (len(tokens) * cdiv(heads, share) * cdiv(dim, block),),
        out, *partial, schedule.tokens, *partial_s, schedule_s.tokens, tokens.start,
        HEADS=heads, DIM=dim, SHARE=share, BLOCK=block, PARTS=at_a_time, MORE=more, TOKEN=TOKEN,
        SHARED=len(parts) > 1, num_warps=4,
    )  # fmt: skip
