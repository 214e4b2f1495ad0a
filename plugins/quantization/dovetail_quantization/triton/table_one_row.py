"""Compute the product of one row and a weight whose codes of 4 bits stand for numbers of a table (``dovetail_quantization.table_weights``).

The row is rounded to integers of 16 bits with a scale for each 128 columns, as in ``integer_one_row``, and so is the table. Instructions that
add up four products of bytes (dp4a) multiply the high bytes of both, and the high bytes of one with the low bytes of the other; the product of
both low bytes is less than what rounding loses, and is left out. Codes are looked up as bytes (``table_numbers``).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.matmul import finish_row, rows_of
from dovetail_quantization.triton.integer_one_row import WORDS, adjacent, in_blocks, largest_of, packed_bytes
from dovetail_quantization.triton.table_numbers import read_words, signed_sums, word_bytes


@triton.jit
def _half(high_codes, low_codes, high, low, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the sums of the products of the first or last two planes of each block, divided by 256, in float32."""
    nothing = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.int32)
    found = signed_sums(high_codes, high[None, :], nothing)
    less = signed_sums(high_codes, low[None, :], nothing)
    less = signed_sums(low_codes, high[None, :], less)
    return tl.sum(tl.reshape(found * 256 + less, [BLOCK_N, BLOCK_K // 8 // WORDS, WORDS]), 2).to(tl.float32)


@triton.jit(do_not_specialize=["tiles"])
def one_row_kernel(
    x, w, scales, look_up, whole, bias, y, n, k, span, group, factor, tiles,
    BFLOAT16: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply one row, ``x`` (int32 ``[k / 2]``), with codes ``w`` (int32 ``[n, k / 8]``). A part has ``span`` columns, at most BLOCK_K;
    if there are several, ``y`` is ``[parts, n]``. ``look_up`` has the words of ``byte_words``; ``factor`` makes the ``whole`` numbers those of the table."""
    index, programs, part = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    at = tl.arange(0, BLOCK_K // 8)
    block = tl.arange(0, BLOCK_K // 8 // WORDS)
    blocks = span // (8 * WORDS)
    words = tl.multiple_of(k // 8, WORDS)
    begin = tl.multiple_of(part * blocks * WORDS, 16 * WORDS)  # there is one part, or each has 16 blocks
    first_column = part * span + block * (8 * WORDS)
    own = (first_column // group * n)[None, :]
    own_after = ((first_column + 4 * WORDS) // group * n)[None, :]
    inside = at < tl.multiple_of(blocks * WORDS, WORDS)
    x += begin * 4
    w += begin
    y += part * n
    rows = rows_of(index, n, GATED, BLOCK_N)
    held = read_words(look_up)
    if PDL:
        gdc_launch_dependents()
    source = w + rows.to(tl.int64)[:, None] * words + at[None, :]
    codes = tl.load(source, inside[None, :], 0, eviction_policy="evict_first")
    scale = tl.load(scales + own + rows[:, None], (block < blocks)[None, :], 0.0)
    scale_after = tl.load(scales + own_after + rows[:, None], (block < blocks)[None, :], 0.0)
    if PDL:
        gdc_wait()
    place = at // WORDS * (4 * WORDS) + at % WORDS  # of the numbers of the first plane
    a0, a1 = adjacent(x, place, inside, BFLOAT16)
    b0, b1 = adjacent(x, place + WORDS, inside, BFLOAT16)
    c0, c1 = adjacent(x, place + 2 * WORDS, inside, BFLOAT16)
    d0, d1 = adjacent(x, place + 3 * WORDS, inside, BFLOAT16)
    largest = tl.maximum(largest_of(a0, a1, b0, b1), largest_of(c0, c1, d0, d1))
    most = tl.maximum(tl.max(in_blocks(largest, BLOCK_K), 1), 1e-30)
    # 32512 = 127 * 256: the high byte of a rounded number is signed
    inverse = tl.broadcast_to((32512.0 / most)[:, None], [BLOCK_K // 8 // WORDS, WORDS])
    inverse = tl.reshape(inverse, [BLOCK_K // 8])
    high, low, _ = packed_bytes(a0, a1, b0, b1, inverse)
    high_after, low_after, _ = packed_bytes(c0, c1, d0, d1, inverse)
    most *= factor * (256.0 / 32512.0)
    for tile in range(index, tiles, programs):
        following = rows_of(tile + programs, n, GATED, BLOCK_N)
        left = tl.where(tile + programs < tiles, blocks, 0)
        source = w + following.to(tl.int64)[:, None] * words + at[None, :]
        needed = (at < tl.multiple_of(left * WORDS, WORDS))[None, :]
        codes_ahead = tl.load(source, needed, 0, eviction_policy="evict_first")
        remains = (block < left)[None, :]
        scale_ahead = tl.load(scales + own + following[:, None], remains, 0.0)
        scale_after_ahead = tl.load(scales + own_after + following[:, None], remains, 0.0)
        first, second, first_after, second_after = word_bytes(codes, held, whole)
        total = _half(first, second, high, low, BLOCK_N, BLOCK_K) * scale
        total += _half(first_after, second_after, high_after, low_after, BLOCK_N, BLOCK_K) * scale_after
        finish_row(y, bias, rows, total * most[None, :], tile, n, GATED, BIAS, BLOCK_N)
        codes, scale, scale_after, rows = codes_ahead, scale_ahead, scale_after_ahead, following
