"""Read weights in packed rows (``ops.packed_blocks``) in kernels: their numbers, and the scales of these."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def code_number(words, INDEX: tl.constexpr, BITS: tl.constexpr):
    """Return code number INDEX of each word plus 16 (BITS 4) or 256 (BITS 8), in float32."""
    mantissa: tl.constexpr = 23 - BITS if BITS == 4 else 15
    shift: tl.constexpr = mantissa - BITS * INDEX
    moved = (words << shift) if shift >= 0 else (words >> -shift)
    mask: tl.constexpr = 0x00780000 if BITS == 4 else 0x007F8000
    exponent: tl.constexpr = 0x41800000 if BITS == 4 else 0x43800000
    return ((moved & mask) | exponent).to(tl.float32, bitcast=True)


@triton.jit
def stored_factors(
    scale, multiplier, rows, words, begin, k,
    UNIT: tl.constexpr, WHOLE: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Return the scales and the multipliers of the units of BLOCK_K columns from ``begin`` on, a multiple of ALIGNED, both ``[rows, BLOCK_K / UNIT]``,
    as they are stored, in 16 or 32 bits. With GROUP 0 there are no multipliers, and the second result is the first."""
    at = tl.multiple_of(begin // UNIT, ALIGNED // UNIT) + tl.arange(0, BLOCK_K // UNIT)
    # Columns are multiples of those of a scale. The compiler uses this for loads of several numbers at a time.
    inside = (at < tl.multiple_of(k // WHOLE * (WHOLE // UNIT), WHOLE // UNIT))[None, :]
    each: tl.constexpr = 32 // scale.dtype.element_ty.primitive_bitwidth
    found = tl.load(scale + rows[:, None] * (words * each) + (at // (WHOLE // UNIT))[None, :], inside, 0.0)
    times = found
    if GROUP:
        place = multiplier + rows[:, None] * (words * 4) + (at // (GROUP // UNIT))[None, :]
        times = tl.load(place, inside, 0)
    return found, times


@triton.jit
def product_of(scale, multiplier, GROUP: tl.constexpr):
    """Return the scales of units from what is stored, in float32."""
    found = scale.to(tl.float32)
    if GROUP:
        found *= multiplier.to(tl.float32)
    return found


@triton.jit
def factors_of(
    scale, multiplier, rows, words, begin, k,
    UNIT: tl.constexpr, WHOLE: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Return the scales of units in float32, see ``stored_factors``."""
    stored, times = stored_factors(scale, multiplier, rows, words, begin, k, UNIT, WHOLE, GROUP, BLOCK_K, ALIGNED)
    return product_of(stored, times, GROUP)


@triton.jit
def spread(factors, ROWS: tl.constexpr, UNITS: tl.constexpr, STEP: tl.constexpr):
    """Return ``factors [ROWS, UNITS]`` for each word, ``[ROWS, UNITS * STEP]``."""
    return tl.reshape(tl.broadcast_to(factors[:, :, None], [ROWS, UNITS, STEP]), [ROWS, UNITS * STEP])
