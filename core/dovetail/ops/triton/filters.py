"""Apply top-k, top-p and min-p without a sort: each is a bound on the logits and a number of tokens that equal it
(``bounds.py``).

Of the tokens equal to the bound, those with the lowest ids stay. A first attempt reads only candidates. If the answer
is below them, a second attempt streams the whole row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.bounds import candidates, key_of, search, split, tile_of, value_of
from dovetail.ops.triton.rows import combine, exponent_scale, invert_blocks


@triton.jit
def _kept(x, bound, ties, seen, min_p, best, scale):
    """Return the weights of a tile, 0 for tokens that the filters exclude, and the number of tokens equal to the
    bound."""
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
    """Return the first token, by id, at which the cumulative kept mass exceeds ``uniform`` times the total kept
    mass."""
    equal = tl.exp2((bound - best) * scale)
    _, total, _ = split(row, groups, limit, vocab, bound, min_p, best, scale, FULL, SUB, TILE)
    total += tl.where(equal >= min_p, ties * equal.to(tl.float64), 0.0)
    target = uniform * total
    before = tl.full((), 0, tl.float64)
    seen = tl.full((), 0, tl.int32)
    start = tl.full((), 0, tl.int32)
    found = tl.full((), -1, tl.int32)
    while (start < limit) & (before <= target):
        token, x = tile_of(row, groups, start, limit, vocab, FULL, SUB, TILE)
        weight, count = _kept(x, bound, ties, seen, min_p, best, scale)
        seen += count
        start += TILE
        mass = tl.sum(weight, axis=0).to(tl.float64)
        if mass > 0:  # the last such token is the result if rounding makes the target exceed the total
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
    """Return the drawn token, or -1 if some tokens that the filters keep are below the key ``floor``.

    If ``whole``, no token below ``floor`` has any weight, and ``total`` is the mass of the row.
    """
    high = key_of(best, SHIFT) + 1
    lowest = value_of(floor, SHIFT)
    each = tl.exp2((lowest - best) * scale)
    above, mass, ties = split(row, groups, limit, vocab, lowest, 0.0, best, scale, FULL, SUB, TILE)
    known = above + ties
    reach = mass + ties * each.to(tl.float64)
    cut = floor
    left = total
    ranked = top_k <= known
    inside = whole | (each < min_p)
    if ranked:
        cut = search(row, groups, limit, vocab, floor, high, top_k, best, scale, False, FULL, SUB, TILE, SHIFT)
        bound = value_of(cut, SHIFT)
        above, mass, _ = split(row, groups, limit, vocab, bound, 0.0, best, scale, FULL, SUB, TILE)
        ties = (top_k - above).to(tl.int32)
        left = mass + ties * tl.exp2((bound - best) * scale).to(tl.float64)
        inside = whole | ranked
    if top_p < 1:
        target = top_p * left
        # the total is unknown if top-k reaches below the floor
        renormalised = ranked | whole | (top_k >= vocab)
        if renormalised & (limit > 0) & (ranked | whole | (reach >= target)):
            lower = search(row, groups, limit, vocab, cut, high, target, best, scale, True, FULL, SUB, TILE, SHIFT)
            bound = value_of(lower, SHIFT)
            _, mass, equal = split(row, groups, limit, vocab, bound, 0.0, best, scale, FULL, SUB, TILE)
            stay = (target - mass) / tl.maximum(tl.exp2((bound - best) * scale).to(tl.float64), 1e-300)
            stay = tl.minimum(tl.maximum(tl.ceil(stay), 1.0), 1073741824.0).to(tl.int32)
            ties = tl.minimum(stay, tl.where(lower == cut, ties, equal))
            cut = lower
            inside = inside | True
        else:
            inside = inside & renormalised
    token = tl.full((), -1, tl.int32)
    if inside:
        bound = value_of(cut, SHIFT)
        token = _draw(row, groups, limit, vocab, bound, ties, min_p, uniform, best, scale, FULL, SUB, TILE)
    return token


@triton.jit(do_not_specialize_on_alignment=["temperature", "top_k", "top_p", "min_p", "uniform", "out"])
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
    """Draw the token of one row. Settings that are None are off."""
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
            used, bound, whole = candidates(peaks + n * count, count, slots, best, scale, SLOTS, PEAKS, SHIFT)
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
                least = key_of(tl.maximum(best - 150.0 / scale, -3.38e38), SHIFT)
                drawn = _attempt(
                    row, slots, vocab, vocab, least, True, k, p, m, number, best, total, scale, True, SUB, TILE, SHIFT
                )
            token = tl.where(drawn < 0, token, drawn)
    tl.store(out + n, token.to(tl.int64))
