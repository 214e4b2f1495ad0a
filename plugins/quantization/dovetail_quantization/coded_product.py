"""Multiply on CUDA with weights of codes: few rows from the codes, more with the weight that a kernel dequantizes each time."""

from __future__ import annotations

from abc import abstractmethod

import torch

from dovetail.interfaces.quantization import LinearProduct
from dovetail.ops.activation import GATES, Activation
from dovetail.ops.linear import linear

MOST_ELEMENTS = 1 << 28
"""The largest number of elements of a weight that are dequantized at a time."""


class CodedProduct(LinearProduct):
    """Multiply with a weight of codes of shape ``shape``, ``(out, in)``. Up to ``most_rows`` rows are multiplied by ``few_rows``, more with
    the weight that ``dequantized`` returns. Unless ``in_parts``, gates are computed apart, and products have no parts. ``what`` names
    the weight in ``describe``."""

    def __init__(self, shape: tuple[int, int], most_rows: int, what: str, *, in_parts: bool = True) -> None:
        self._shape, self._most_rows, self._what, self.in_parts = shape, most_rows, what, in_parts

    @abstractmethod
    def few_rows(
        self, x: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None = None
    ) -> torch.Tensor:
        """Compute ``forward`` of rows that are few, or ``gated`` if there is an ``activation``."""

    @abstractmethod
    def few_rows_in_parts(self, x: torch.Tensor) -> torch.Tensor | None:
        """Compute ``parts`` of rows that are few."""

    @abstractmethod
    def dequantized(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return ``rows`` of the weight, rounded to ``dtype``. Start and stop are numbers of rows that exist."""

    def is_few(self, x: torch.Tensor) -> bool:
        """Return True if ``few_rows`` multiplies ``x``."""
        return 0 < len(x) <= self._most_rows

    def inputs(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` with its columns in the order of those of the weight."""
        return x

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight ``[out, in]``, dequantized by a kernel."""
        return self.dequantized(slice(0, self._shape[0]), dtype)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See ``LinearProduct``."""
        if not len(x):
            return x.new_empty(0, self._shape[0])
        x = self.inputs(x)
        return self.few_rows(x, bias) if self.is_few(x) else self._many_rows(x, bias)

    def _many_rows(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        n, k = self._shape
        if n * k <= MOST_ELEMENTS:
            return linear(x, self.weight(x.dtype), bias)
        y, most = x.new_empty(len(x), n), max(1, MOST_ELEMENTS // k)
        step = most // 64 * 64 or most  # addresses of all pieces are aligned
        for start in range(0, n, step):
            rows = slice(start, min(start + step, n))
            y[:, rows] = linear(x, self.dequantized(rows, x.dtype), None if bias is None else bias[rows])
        return y

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> torch.Tensor:
        """See ``LinearProduct``."""
        if not self.in_parts or not self.is_few(x):
            return GATES[activation](self.forward(x, bias))
        return self.few_rows(self.inputs(x), bias, activation)

    def parts(self, x: torch.Tensor) -> torch.Tensor | None:
        """See ``LinearProduct``."""
        if not self.in_parts or not self.is_few(x):
            return None
        return self.few_rows_in_parts(self.inputs(x))

    @property
    def describe(self) -> str:
        """See ``LinearProduct``."""
        few = f"up to {self._most_rows} rows triton, more " if self._most_rows else ""
        return f"{self._what}, {few}dequantized in each step and cuBLAS"
