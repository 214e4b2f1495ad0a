"""Find bounds on logits without a sort: the filters keep the tokens above a bound, and some of those equal to it.

A bound is found by bisection over integers that have the same order as the floating point numbers. It is the largest
number at which the count (top-k) or the mass (top-p) of the tokens not below it reaches a target. Nearly always only a
few tokens are kept, so a search may read candidates only. The candidates are the groups of ``SUB`` tokens with the
``SLOTS`` largest maxima; they contain every token above the smallest of these maxima.

``row`` points to the logits of a row. With ``FULL``, the tokens ``[0, limit)`` are read, otherwise the tokens of
``limit // SUB`` listed groups, ``TILE`` tokens at a time. A weight is ``exp((logit - best) / T)``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.ops.triton.rows import clean

SLOTS = 512  # number of groups whose tokens are candidates


def value_bits(dtype: torch.dtype) -> int:
    """Return the number of low bits of a float32 in which numbers of ``dtype`` cannot differ."""
    return {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}[dtype]


@triton.jit
def key_of(value, SHIFT: tl.constexpr):
    """Return an integer that orders as ``value``, a float32, does, without its ``SHIFT`` lowest bits."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def value_of(key, SHIFT: tl.constexpr):
    """Return the float32 of a key, with its lowest bits 0."""
    key = (key << SHIFT) | tl.where(key < 0, (1 << SHIFT) - 1, 0)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def tile_of(row, groups, start, limit, vocab, FULL: tl.constexpr, SUB: tl.constexpr, TILE: tl.constexpr):
    """Return the ids, ascending, and the logits of ``TILE`` tokens, of the whole row or of the listed groups."""
    at = start + tl.arange(0, TILE)
    token = at
    if not FULL:
        token = tl.load(groups + at // SUB, mask=at < limit, other=0) * SUB + at % SUB
    mask = (at < limit) & (token < vocab)
    return token, clean(tl.load(row + token, mask=mask, other=float("-inf")))


@triton.jit
def split(
    row, groups, limit, vocab, bound, least, best, scale, FULL: tl.constexpr, SUB: tl.constexpr, TILE: tl.constexpr
):
    """Return the number and the mass of the tokens above ``bound`` whose weight is not below ``least``, and the number
    of tokens equal to ``bound``."""
    above = tl.zeros((TILE,), tl.int32)
    equal = tl.zeros((TILE,), tl.int32)
    mass = tl.zeros((TILE,), tl.float32)
    for start in range(0, limit, TILE):
        _, x = tile_of(row, groups, start, limit, vocab, FULL, SUB, TILE)
        weight = tl.exp2((x - best) * scale)
        inside = (x > bound) & (weight >= least)
        above += inside.to(tl.int32)
        equal += (x == bound).to(tl.int32)
        mass += tl.where(inside, weight, 0.0)
    return tl.sum(above, axis=0), tl.sum(mass, axis=0).to(tl.float64), tl.sum(equal, axis=0)


@triton.jit
def search(
    row,
    groups,
    limit,
    vocab,
    low,
    high,
    target,
    best,
    scale,
    MASS: tl.constexpr,
    FULL: tl.constexpr,
    SUB: tl.constexpr,
    TILE: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Return the largest key in ``[low, high)`` at which the number (or mass) of the tokens not below it reaches
    ``target``.

    The target is assumed to be reached at ``low``. Every pass over the tokens divides the interval by four.
    """
    while low + 1 < high:
        half = _middle(low, high)
        quarter = _middle(low, half)
        last = _middle(half, high)
        bound1 = value_of(quarter, SHIFT)
        bound2 = value_of(half, SHIFT)
        bound3 = value_of(last, SHIFT)
        sum1 = tl.zeros((TILE,), tl.float32)  # counts are exact in float32
        sum2 = tl.zeros((TILE,), tl.float32)
        sum3 = tl.zeros((TILE,), tl.float32)
        for start in range(0, limit, TILE):
            _, x = tile_of(row, groups, start, limit, vocab, FULL, SUB, TILE)
            weight = tl.full((TILE,), 1, tl.float32)
            if MASS:
                weight = tl.exp2((x - best) * scale)
            sum1 += tl.where(x >= bound1, weight, 0.0)
            sum2 += tl.where(x >= bound2, weight, 0.0)
            sum3 += tl.where(x >= bound3, weight, 0.0)
        reach1 = tl.sum(sum1, axis=0) >= target
        reach2 = tl.sum(sum2, axis=0) >= target
        reach3 = tl.sum(sum3, axis=0) >= target
        high = tl.where(reach3, high, tl.where(reach2, last, tl.where(reach1, half, quarter)))
        low = tl.where(reach3, last, tl.where(reach2, half, tl.where(reach1, quarter, low)))
    return low


@triton.jit
def candidates(peaks, count, groups, best, scale, SLOTS: tl.constexpr, PEAKS: tl.constexpr, SHIFT: tl.constexpr):
    """Write the groups whose maxima reach a bound, in ascending order. Return their number, the bound, and whether they
    contain every token that has any weight.

    The bound is reached by nearly ``SLOTS`` maxima. If fewer maxima belong to tokens with any weight, it is a bound
    below which no token has any weight.
    """
    at = tl.arange(0, PEAKS)
    peak = tl.load(peaks + at, mask=at < count, other=float("-inf")).to(tl.float32)
    low = key_of(tl.maximum(best - 150.0 / scale, -3.38e38), SHIFT)
    high = key_of(best, SHIFT) + 1
    whole = tl.sum((peak >= value_of(low, SHIFT)).to(tl.int32), axis=0) <= SLOTS
    high = tl.where(whole, low, high)
    while low + 1 < high:
        middle = _middle(low, high)
        reach = tl.sum((peak >= value_of(middle, SHIFT)).to(tl.int32), axis=0)
        if reach > SLOTS:
            low = middle
        else:
            high = middle
            low = tl.where(reach > SLOTS - SLOTS // 8, middle, low)  # close enough: the loop ends
    chosen = (peak >= value_of(high, SHIFT)).to(tl.int32)
    tl.store(groups + tl.cumsum(chosen, axis=0) - 1, at, mask=chosen > 0)
    tl.debug_barrier()
    return tl.sum(chosen, axis=0), high, whole
