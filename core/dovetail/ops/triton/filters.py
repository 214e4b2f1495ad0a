"""Top-k, top-p and min-p without a sort: each is a bound on the logits and a number of tokens that equal it.

A bound is found by bisection over the ordered integers that floating point numbers are: the largest at which the count
(top-k) or the mass (top-p) of the tokens not below it reaches a target. Of the tokens equal to the bound those of lowest
id stay. Because what is kept is nearly always a handful, a first attempt looks only at candidates: the groups of ``SUB``
tokens whose maxima are the ``SLOTS`` largest hold every token above the smallest of these maxima. Where the answer lies
below it, a second attempt streams the whole row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.rows import clean, combine, exponent_scale, invert_blocks

SLOTS = 512  # groups whose tokens are candidates


def value_bits(dtype: torch.dtype) -> int:
    """Low bits of a float32 in which numbers of ``dtype`` cannot differ."""
    return {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}[dtype]


@triton.jit
def _key(value, SHIFT: tl.constexpr):
    """The integer of a float32 in whose order floats are ordered, without its ``SHIFT`` lowest bits."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    """The float32 of a key, its lowest bits 0."""
    key = (key << SHIFT) | tl.where(key < 0, (1 << SHIFT) - 1, 0)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def _tile(row, groups, start, limit, vocab, FULL: tl.constexpr, SUB: tl.constexpr, TILE: tl.constexpr):
    """Ids, ascending, and logits of ``TILE`` tokens: of the whole row, or of the groups listed."""
    at = start + tl.arange(0, TILE)
    token = at
    if not FULL:
        token = tl.load(groups + at // SUB, mask=at < limit, other=0) * SUB + at % SUB
    mask = (at < limit) & (token < vocab)
    return token, clean(tl.load(row + token, mask=mask, other=float("-inf")))


@triton.jit
def _split(
    row, groups, limit, vocab, bound, least, best, scale, FULL: tl.constexpr, SUB: tl.constexpr, TILE: tl.constexpr
):
    """Number and mass of the tokens above ``bound`` whose weight is not below ``least``; how many equal ``bound``."""
    above = tl.zeros((TILE,), tl.int32)
    equal = tl.zeros((TILE,), tl.int32)
    mass = tl.zeros((TILE,), tl.float32)
    for start in range(0, limit, TILE):
        _, x = _tile(row, groups, start, limit, vocab, FULL, SUB, TILE)
        weight = tl.exp2((x - best) * scale)
        inside = (x > bound) & (weight >= least)
        above += inside.to(tl.int32)
        equal += (x == bound).to(tl.int32)
        mass += tl.where(inside, weight, 0.0)
    return tl.sum(above, axis=0), tl.sum(mass, axis=0).to(tl.float64), tl.sum(equal, axis=0)


@triton.jit
def _search(
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
    """The largest key in ``[low, high)`` such that the number (or mass) of the tokens not below it reaches ``target``.

    At ``low`` it is taken to. Every pass over the tokens cuts the interval in four.
    """
    while low + 1 < high:
        half = _middle(low, high)
        quarter = _middle(low, half)
        last = _middle(half, high)
        bound1 = _value(quarter, SHIFT)
        bound2 = _value(half, SHIFT)
        bound3 = _value(last, SHIFT)
        sum1 = tl.zeros((TILE,), tl.float32)  # counts are exact in it
        sum2 = tl.zeros((TILE,), tl.float32)
        sum3 = tl.zeros((TILE,), tl.float32)
        for start in range(0, limit, TILE):
            _, x = _tile(row, groups, start, limit, vocab, FULL, SUB, TILE)
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
def _kept(x, bound, ties, seen, min_p, best, scale):
    """Weights of a tile, 0 for what the filters exclude; and how many equal the bound."""
    equal = x == bound
    count = tl.sum(equal.to(tl.int32), axis=0)
    stays = equal & (seen < ties)
    if (seen < ties) & (seen + count > ties):
        stays = equal & (seen + tl.cumsum(equal.to(tl.int32), axis=0) <= ties)
    weight = tl.exp2((x - best) * scale)
    return tl.where(((x > bound) | stays) & (weight >= min_p), weight, 0.0), count


@triton.jit
def _draw(
    row,
    groups,
    limit,
    vocab,
    bound,
    ties,
    min_p,
    uniform,
    best,
    scale,
    FULL: tl.constexpr,
    SUB: tl.constexpr,
    TILE: tl.constexpr,
):
    """The first token, by id, whose cumulative kept mass exceeds ``uniform`` of all that is kept."""
    equal = tl.exp2((bound - best) * scale)
    _, total, _ = _split(row, groups, limit, vocab, bound, min_p, best, scale, FULL, SUB, TILE)
    total += tl.where(equal >= min_p, ties * equal.to(tl.float64), 0.0)
    target = uniform * total
    before = tl.full((), 0, tl.float64)
    seen = tl.full((), 0, tl.int32)
    start = tl.full((), 0, tl.int32)
    found = tl.full((), -1, tl.int32)
    while (start < limit) & (before <= target):
        token, x = _tile(row, groups, start, limit, vocab, FULL, SUB, TILE)
        weight, count = _kept(x, bound, ties, seen, min_p, best, scale)
        seen += count
        start += TILE
        mass = tl.sum(weight, axis=0).to(tl.float64)
        if mass > 0:  # the last of these, should rounding make the target more than all there is
            found = tl.max(tl.where(weight > 0, token, -1), axis=0)
        if before + mass > target:
            reached = before + tl.cumsum(weight.to(tl.float64), axis=0)
            found = tl.minimum(found, tl.min(tl.where((reached > target) & (weight > 0), token, 2**30), axis=0))
        before += mass
    return found


@triton.jit
def _attempt(
    row,
    groups,
    limit,
    vocab,
    floor,
    whole,
    top_k,
    top_p,
    min_p,
    uniform,
    best,
    total,
    scale,
    FULL: tl.constexpr,
    SUB: tl.constexpr,
    TILE: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """The token drawn, or -1 if what the filters keep does not all lie at or above the key ``floor``.

    ``whole``: nothing of any weight lies below ``floor``, ``total`` is the mass of the row.
    """
    high = _key(best, SHIFT) + 1
    lowest = _value(floor, SHIFT)
    each = tl.exp2((lowest - best) * scale)
    above, mass, ties = _split(row, groups, limit, vocab, lowest, 0.0, best, scale, FULL, SUB, TILE)
    known = above + ties
    reach = mass + ties * each.to(tl.float64)
    cut = floor
    left = total
    ranked = top_k <= known
    inside = whole | (each < min_p)
    if ranked:
        cut = _search(row, groups, limit, vocab, floor, high, top_k, best, scale, False, FULL, SUB, TILE, SHIFT)
        bound = _value(cut, SHIFT)
        above, mass, _ = _split(row, groups, limit, vocab, bound, 0.0, best, scale, FULL, SUB, TILE)
        ties = (top_k - above).to(tl.int32)
        left = mass + ties * tl.exp2((bound - best) * scale).to(tl.float64)
        inside = whole | ranked
    if top_p < 1:
        target = top_p * left
        # the total is not known where top-k reaches below the floor
        renormalised = ranked | whole | (top_k >= vocab)
        if renormalised & (limit > 0) & (ranked | whole | (reach >= target)):
            lower = _search(row, groups, limit, vocab, cut, high, target, best, scale, True, FULL, SUB, TILE, SHIFT)
            bound = _value(lower, SHIFT)
            _, mass, equal = _split(row, groups, limit, vocab, bound, 0.0, best, scale, FULL, SUB, TILE)
            stay = (target - mass) / tl.maximum(tl.exp2((bound - best) * scale).to(tl.float64), 1e-300)
            stay = tl.minimum(tl.maximum(tl.ceil(stay), 1.0), 1073741824.0).to(tl.int32)
            ties = tl.minimum(stay, tl.where(lower == cut, ties, equal))
            cut = lower
            inside = inside | True
        else:
            inside = inside & renormalised
    token = tl.full((), -1, tl.int32)
    if inside:
        bound = _value(cut, SHIFT)
        token = _draw(row, groups, limit, vocab, bound, ties, min_p, uniform, best, scale, FULL, SUB, TILE)
    return token


@triton.jit
def _candidates(peaks, count, groups, best, scale, SLOTS: tl.constexpr, PEAKS: tl.constexpr, SHIFT: tl.constexpr):
    """Writes the groups whose maxima reach a bound, ascending. Returns how many, the bound, whether these are all.

    The bound is one that nearly ``SLOTS`` maxima reach, or, if no more do, one below which no token has any weight.
    """
    at = tl.arange(0, PEAKS)
    peak = tl.load(peaks + at, mask=at < count, other=float("-inf")).to(tl.float32)
    low = _key(tl.maximum(best - 150.0 / scale, -3.38e38), SHIFT)
    high = _key(best, SHIFT) + 1
    whole = tl.sum((peak >= _value(low, SHIFT)).to(tl.int32), axis=0) <= SLOTS
    high = tl.where(whole, low, high)
    while low + 1 < high:
        middle = _middle(low, high)
        reach = tl.sum((peak >= _value(middle, SHIFT)).to(tl.int32), axis=0)
        if reach > SLOTS:
            low = middle
        else:
            high = middle
            low = tl.where(reach > SLOTS - SLOTS // 8, middle, low)  # enough: the loop ends
    chosen = (peak >= _value(high, SHIFT)).to(tl.int32)
    tl.store(groups + tl.cumsum(chosen, axis=0) - 1, at, mask=chosen > 0)
    tl.debug_barrier()
    return tl.sum(chosen, axis=0), high, whole


@triton.jit
def filtered_kernel(
    logits,
    row_stride,
    vocab,
    temperature,
    temperature_stride,
    top_k,
    top_k_stride,
    top_p,
    top_p_stride,
    min_p,
    min_p_stride,
    uniform,
    values,
    ids,
    peaks,
    groups,
    out,
    blocks,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    SUB: tl.constexpr,
    PEAKS: tl.constexpr,
    SHIFT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Draws one row's token. Settings that are None are off."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.program_id(0).to(tl.int64)
    TILE: tl.constexpr = SLOTS * SUB
    row = logits + n * row_stride
    heat = tl.load(temperature + n * temperature_stride)
    scale = exponent_scale(heat)
    number = tl.load(uniform + n)
    k = tl.full((), 2**30, tl.int64)
    p = tl.full((), 1, tl.float64)
    m = tl.full((), 0, tl.float32)
    if top_k is not None:
        k = tl.load(top_k + n * top_k_stride)
    if top_p is not None:
        p = tl.load(top_p + n * top_p_stride)
    if min_p is not None:
        m = tl.load(min_p + n * min_p_stride).to(tl.float32)
    best, token, mass, maxima = combine(row, n, vocab, values, ids, blocks, scale, BLOCKS, SUB)
    total = tl.sum(mass, axis=0)
    if (heat != 0) & (total > 0):
        if (k >= vocab) & (p >= 1) & (m <= 0):
            token = invert_blocks(row, vocab, number, scale, best, token, mass, maxima, BLOCKS, BLOCK)
        else:
            count = (vocab + SUB - 1) // SUB
            slots = groups + n * SLOTS
            used, bound, whole = _candidates(peaks + n * count, count, slots, best, scale, SLOTS, PEAKS, SHIFT)
            drawn = _attempt(
                row,
                slots,
                used * SUB,
                vocab,
                bound,
                whole,
                k,
                p,
                m,
                number,
                best,
                total,
                scale,
                False,
                SUB,
                TILE,
                SHIFT,
            )
            if drawn < 0:
                least = _key(tl.maximum(best - 150.0 / scale, -3.38e38), SHIFT)
                drawn = _attempt(
                    row, slots, vocab, vocab, least, True, k, p, m, number, best, total, scale, True, SUB, TILE, SHIFT
                )
            token = tl.where(drawn < 0, token, drawn)
    tl.store(out + n, token.to(tl.int64))
