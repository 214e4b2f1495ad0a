"""Convert numbers of 8 bits (e4m3, e5m2) to float16 for products of tensor cores.

Devices convert two neighbouring bytes to float16 by one instruction, exactly. To bfloat16 they need another instruction for each
number, which compute capability 9.0 executes at a quarter of the usual rate: it would take longer than reading the bytes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LEAST_POWER = tl.constexpr(2.0**-100)
"""Rows with smaller numbers are not made larger."""


def are_pairs(values: torch.Tensor, head: int) -> bool:
    """Return True if the numbers of ``values``, which have 8 bits and are ``head`` numbers apart from one head to the next, can be read as
    integers of 16 bits."""
    return values.shape[-1] % 2 == head % 2 == values.storage_offset() % 2 == 0


@triton.jit
def power_of_rows(x):
    """Return the power of two just below the largest absolute value of each row of ``x [rows, n]``: float32 ``[rows]``."""
    largest = tl.max(tl.abs(x.to(tl.float32)), 1)
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.maximum(power, LEAST_POWER)


@triton.jit
def half_rows(x, power):
    """Return ``x * 2 ** 13 / power`` in float16, whose largest elements are below ``2 ** 14``. Elements that are more than
    ``2 ** 27`` times smaller than the largest of their row lose bits."""
    return (x.to(tl.float32) * (8192.0 / power)[:, None]).to(tl.float16)


@triton.jit
def half_queries(query, rest, scale, REST: tl.constexpr):
    """Return both parts of queries in float16 (``rest`` unchanged without REST), and the ``scale`` of their logits for each row
    ``[rows, 1]``, which undoes the power of two by which the row was multiplied."""
    power = power_of_rows(query)
    if REST:
        power = tl.maximum(power, power_of_rows(rest))
        rest = half_rows(rest, power)
    return half_rows(query, power), rest, scale * (power / 8192.0)[:, None]


@triton.jit
def half_pairs(pairs, dtype: tl.constexpr):
    """Return the even and the odd elements of two neighbouring numbers of ``dtype``, which has 8 bits, in each 16-bit
    integer of ``pairs``, as two float16 tensors."""
    even = (pairs & 0xFF).to(tl.uint8).to(dtype, bitcast=True).to(tl.float16)
    odd = (pairs >> 8).to(tl.uint8).to(dtype, bitcast=True).to(tl.float16)
    return even, odd
