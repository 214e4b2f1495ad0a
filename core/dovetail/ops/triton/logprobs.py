"""Compute log-probabilities in two steps: statistics of every block of a row, then one program per row.

The most likely tokens are searched in the groups of ``SUB`` tokens with the largest maxima. ``k`` groups contain the
``k`` most likely tokens: a token outside of them has ``k`` tokens that are at least as likely, one in each group. A
number and an index are compared as one integer, which is unique in its row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton import sampling
from dovetail.ops.triton.bounds import key_of, value_of
from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.rows import SUB, clean
from dovetail.ops.triton.sizes import next_power_of_2


@triton.jit
def _ordered(value, index):
    """Return an int64 that orders by ``value`` (float32), and of equal values the one with the lowest index first."""
    return (key_of(value, 0).to(tl.int64) << 32) + (2147483647 - index)


@triton.jit
def _index_of(ordered):
    return 2147483647 - (ordered & 2147483647)


@triton.jit
def _logprobs_kernel(
    logits,
    row_stride,
    vocab,
    tokens,
    values,
    peaks,
    blocks,
    chosen,
    top,
    top_ids,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PEAKS: tl.constexpr,
    SUB: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the log-probabilities of one row. ``values`` and ``peaks`` are those of ``sampling._stats_kernel``."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.program_id(0).to(tl.int64)
    LEAST: tl.constexpr = -9223372036854775807
    row = logits + n * row_stride
    block = tl.arange(0, BLOCKS)
    maxima = tl.load(values + n * 2 * blocks + block, mask=block < blocks, other=float("-inf"))
    sums = tl.load(values + (n * 2 + 1) * blocks + block, mask=block < blocks, other=0.0)
    best = tl.max(maxima, axis=0)
    best = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(sums * tl.exp2((maxima - best) * 1.4426950408889634), axis=0)
    log_sum = best + tl.log(total)
    x = clean(tl.load(row + tl.load(tokens + n)))
    tl.store(chosen + n, x - log_sum)

    count = (vocab + SUB - 1) // SUB
    at = tl.arange(0, PEAKS)
    peak = tl.load(peaks + n * count + at, mask=at < count, other=0.0).to(tl.float32)
    left = tl.where(at < count, _ordered(peak, at), LEAST)
    place = tl.arange(0, GROUPS)
    groups = tl.full((GROUPS,), 2**26, tl.int32)  # behind the last group
    for i in range(K):
        first = tl.max(left, axis=0)
        groups = tl.where((place == i) & (first > LEAST), _index_of(first).to(tl.int32), groups)
        left = tl.where(left == first, LEAST, left)

    token = groups[:, None] * SUB + tl.arange(0, SUB)[None, :]
    x = clean(tl.load(row + token, mask=token < vocab, other=float("-inf")))
    among = tl.where(token < vocab, _ordered(x, token), LEAST)
    for i in range(K):
        first = tl.max(tl.max(among, axis=1), axis=0)
        tl.store(top + n * K + i, value_of((first >> 32).to(tl.int32), 0) - log_sum)
        tl.store(top_ids + n * K + i, _index_of(first))
        among = tl.where(among == first, LEAST, among)


def chosen_and_top(
    logits: torch.Tensor, tokens: torch.Tensor, chosen: torch.Tensor, top: torch.Tensor, top_ids: torch.Tensor
) -> None:
    """Compute ``dovetail.ops.logprobs.chosen_and_top``."""
    (n, vocab), k = logits.shape, top.shape[1]
    assert 1 <= k <= vocab
    assert logits.stride(1) == 1
    assert top.is_contiguous()
    assert top_ids.is_contiguous()
    assert tokens.is_contiguous()
    assert chosen.is_contiguous()
    if n == 0:
        return
    values, ids, peaks = sampling.statistics(logits, None, with_sums=True, with_peaks=True)
    blocks = ids.shape[1]
    launch(
        _logprobs_kernel,
        (n,),
        logits,
        logits.stride(0),
        vocab,
        tokens,
        values,
        peaks,
        blocks,
        chosen,
        top,
        top_ids,
        K=k,
        GROUPS=next_power_of_2(k),
        BLOCKS=next_power_of_2(blocks),
        PEAKS=next_power_of_2(peaks.shape[1]),
        SUB=SUB,
        num_warps=16,
    )
