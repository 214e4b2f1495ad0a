"""Define what all kernels that quantize to FP8 (E4M3, arXiv 2209.05433) have in common."""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(448.0)
"""The largest number of E4M3."""


@triton.jit
def scale_of(largest, bound):
    """Return the scale of numbers of which ``largest`` is the largest magnitude. Magnitudes above ``bound`` count as it."""
    largest = tl.minimum(largest, bound)
    return tl.where(largest > 0.0, largest / LARGEST, 1.0)


@triton.jit
def divided(numbers, scale):
    """Return float32 ``numbers`` divided by ``scale``, to be rounded. NaN stays NaN."""
    all_nan: tl.constexpr = tl.PropagateNan.ALL
    return tl.minimum(tl.maximum(numbers / scale, -LARGEST, all_nan), LARGEST, all_nan)


@triton.jit
def rounded(numbers, ARITHMETIC: tl.constexpr):
    """Return what ``divided`` returned, rounded to FP8; with ARITHMETIC as float32 numbers."""
    if ARITHMETIC:
        exponent = tl.maximum((numbers.to(tl.int32, bitcast=True) >> 23) & 255, 121)  # the least is that of subnormals
        step = ((exponent - 3) << 23).to(tl.float32, bitcast=True)
        codes = ((numbers / step + 12582912.0) - 12582912.0) * step
    else:
        codes = numbers.to(tl.float8e4nv)
    return codes
