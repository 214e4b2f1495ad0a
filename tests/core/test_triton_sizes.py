"""Test sizes of grids and blocks against Triton's own functions.

.venv/bin/python -m pytest -q tests/core/test_triton_sizes.py
"""

from __future__ import annotations

import pytest

from dovetail.ops.triton.sizes import cdiv, next_power_of_2

triton = pytest.importorskip("triton")


def test_sizes_are_those_of_triton():
    numbers = [*range(1, 300), *(2**n + d for n in range(8, 40) for d in (-1, 0, 1))]
    assert [next_power_of_2(n) for n in numbers] == [triton.next_power_of_2(n) for n in numbers]
    pairs = [(a, b) for a in (0, *numbers) for b in (1, 2, 3, 7, 64, 128, 1000)]
    assert [cdiv(a, b) for a, b in pairs] == [triton.cdiv(a, b) for a, b in pairs]
