"""Test that a row of an interpreted ``tl.dot`` has the same bits at every index of its block, with every BLAS that
numpy may be built with.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_interpreted_products.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from dovetail.testing.interpreted import product


@triton.jit
def _dot(a, b, out, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    rows, inner, columns = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    left = tl.load(a + rows[:, None] * K + inner[None])
    right = tl.load(b + inner[:, None] * N + columns[None])
    tl.store(out + rows[:, None] * N + columns[None], tl.dot(left, right, input_precision="ieee"))


def _run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    (m, k), n = a.shape, b.shape[1]
    out = torch.full((m, n), torch.nan)
    _dot[(1,)](a, b, out, m, k, n)
    return out


def _position_dependent(a: np.ndarray, b: np.ndarray, dtype: type | None = None, **_: object) -> np.ndarray:
    """Multiply as some builds of BLAS do: rows in the lower half of the block are added up in reverse order."""
    whole, reverse = product(a, b, dtype), product(a[:, ::-1], b[::-1], dtype)
    half = len(a) // 2
    return np.concatenate([whole[:half], reverse[half:]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(16, 16, 16), (64, 128, 32), (128, 64, 64)], ids=str)
def test_rows_are_independent_whatever_blas_does(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], dtype: torch.dtype
):
    m, k, n = shape
    a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    plain = product(a.numpy(), b.numpy(), np.float32)
    assert (_position_dependent(a.numpy(), b.numpy(), np.float32) != plain).any(), "the stand-in for BLAS is harmless"
    monkeypatch.setattr(np, "matmul", _position_dependent)
    expected = _run(a, b)
    torch.testing.assert_close(expected, a.float() @ b.float(), atol=1e-4, rtol=1e-4)
    for shift in range(1, m):
        assert torch.equal(_run(a.roll(shift, 0), b), expected.roll(shift, 0))
    for rows in (16, m):
        assert torch.equal(_run(a[:rows].contiguous(), b), expected[:rows])
