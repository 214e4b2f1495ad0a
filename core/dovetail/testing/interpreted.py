"""Make interpreted Triton kernels repeatable to the bit, for tests that compare bits without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np


def product(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], dtype: Any) -> np.ndarray[Any, Any]:
    """Return ``a [m, k] @ b [k, n]``, accumulated in ``dtype``, without BLAS.

    The bits of a row of the result depend on that row of ``a`` and on ``b`` alone. BLAS does not guarantee this: on some
    processors with AVX-512, OpenBLAS gives a row other bits at another place of the block. Tensor cores of a GPU give
    it the same bits.
    """
    return np.einsum("...mk,...kn->...mn", a.astype(dtype), b.astype(dtype), optimize=False)


@contextmanager
def independent_rows() -> Iterator[None]:
    """Compute ``tl.dot`` of kernels that run under ``TRITON_INTERPRET=1`` by ``product`` while the context is entered.

    Only the interpreter is changed. Use it around every test that compares the bits of two calls of an interpreted kernel.
    """
    from triton.runtime import interpreter

    with patch.object(interpreter, "np", _Numpy()):
        yield


class _Numpy:
    """Forward every attribute to numpy except ``matmul``, which is ``product``."""

    def __init__(self) -> None:
        vars(self).update(
            (name, value) for name, value in vars(np).items() if name != "matmul"
        )  # the interpreter reads many

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def matmul(self, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], dtype: Any = None) -> np.ndarray[Any, Any]:
        return product(a, b, dtype or np.result_type(a, b))
