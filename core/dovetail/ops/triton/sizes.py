"""Compute sizes of grids and blocks on the host. Triton has functions of the same names that take about 4 us a call,
because kernels may call them too; a step calls them hundreds of times."""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """Return ``a / b`` rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least ``n``, which must be at least 1."""
    return 1 << (n - 1).bit_length()
