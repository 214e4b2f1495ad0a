"""Define the functions that the sampling kernels share: clean logits, and combine the statistics of a row's blocks.

The first step of sampling computes, for every block of ``BLOCK`` tokens, the maximum, the first group of ``SUB`` tokens
that contains it, and the sum of ``exp((l - maximum) / T)``.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 4096
SUB = 16  # 32 bytes of bfloat16


@triton.jit
def clean(x):
    """Return ``x`` as float32, with NaN replaced by -inf and +inf by a finite number."""
    return tl.minimum(tl.maximum(x.to(tl.float32), float("-inf")), 3.3895313892515355e38)


@triton.jit
def exponent_scale(temperature):
    """Return the factor of logits before ``exp2``, bounded so that its products with 0 and with inf stay 0 and inf."""
    scale = 1.4426950408889634 / tl.where(temperature == 0, 1.0, temperature)
    return tl.minimum(tl.maximum(scale, 1e-37), 1e37)


@triton.jit
def best_token(row, vocab, maxima, groups, SUB: tl.constexpr):
    """Return the first token that has the maximum of ``maxima``. ``groups`` are the first groups with the maximum of
    each block."""
    best = tl.max(maxima, axis=0)
    token = tl.min(tl.where(maxima == best, groups, 2**30), axis=0) * SUB + tl.arange(0, SUB)
    x = clean(tl.load(row + token, mask=token < vocab, other=float("-inf")))
    return tl.minimum(tl.min(tl.where(x == best, token, vocab), axis=0), vocab - 1)


@triton.jit
def combine(row, n, vocab, values, ids, blocks, scale, BLOCKS: tl.constexpr, SUB: tl.constexpr):
    """Return the best value (0 if all are -inf), the best token, and the mass (float64 ``[BLOCKS]``) and maxima of row
    ``n``'s blocks."""
    block = tl.arange(0, BLOCKS)
    maxima = tl.load(values + n * 2 * blocks + block, mask=block < blocks, other=float("-inf"))
    sums = tl.load(values + (n * 2 + 1) * blocks + block, mask=block < blocks, other=0.0)
    token = best_token(row, vocab, maxima, tl.load(ids + n * blocks + block, mask=block < blocks, other=2**20), SUB)
    best = tl.max(maxima, axis=0)
    best = tl.where(best == float("-inf"), 0.0, best)
    mass = sums.to(tl.float64) * tl.exp2((maxima - best) * scale).to(tl.float64)
    return best, token, mass, maxima


@triton.jit
def invert_blocks(row, vocab, uniform, scale, best, token, mass, maxima, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the first token at which the cumulative mass exceeds ``uniform`` of the total, or ``token`` if there is no
    mass."""
    block = tl.arange(0, BLOCKS)
    total = tl.sum(mass, axis=0)
    target = uniform * total
    cumulative = tl.cumsum(mass, axis=0)
    chosen = tl.min(tl.where((cumulative > target) & (mass > 0), block, BLOCKS), axis=0)
    # rounding may make the target equal to the total
    chosen = tl.minimum(chosen, tl.max(tl.where(mass > 0, block, 0), axis=0))
    before = tl.max(tl.where(block < chosen, cumulative, 0.0), axis=0)
    peak = tl.max(tl.where(block == chosen, maxima, float("-inf")), axis=0)
    if total > 0:
        at = chosen * BLOCK + tl.arange(0, BLOCK)
        x = clean(tl.load(row + at, mask=at < vocab, other=float("-inf")))
        weight = tl.exp2((x - peak) * scale)
        factor = tl.exp2((peak - best) * scale).to(tl.float64)
        reached = before + tl.cumsum(weight.to(tl.float64), axis=0) * factor
        token = tl.min(tl.where((reached > target) & (weight > 0), at, 2**30), axis=0)
        token = tl.minimum(token, tl.max(tl.where(weight > 0, at, 0), axis=0))
    return token
