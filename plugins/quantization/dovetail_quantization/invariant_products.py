"""Multiply with quantized weights so that the bits of a row do not depend on the other rows of a step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dovetail.interfaces.quantization import LinearProduct
from dovetail.ops.activation import GATES, Activation
from dovetail.ops.linear import invariant_rows, linear


class InvariantLinear(LinearProduct):
    """Multiply with the weight ``[out, in]`` that ``weight`` returns in the dtype of activations, in each step. What it computes does not
    depend on the rows. On CUDA the product is that of unquantized models with ``batch_invariant``, for any number of rows; raises ``ConfigError`` if
    there is none for the weight. On a CPU, and in float32, rows are multiplied one by one. The columns belong to the inputs in ``order``, if it is
    given. There are no parts: a norm would add them up in another order."""

    def __init__(
        self,
        weight: Callable[[torch.dtype], torch.Tensor],
        dtype: torch.dtype,
        what: str,
        order: torch.Tensor | None = None,
    ) -> None:
        self._weight, self._what, self._order = weight, what, order
        sample = weight(dtype)
        if sample.is_cuda and dtype is not torch.float32:
            invariant_rows(sample)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See ``LinearProduct``."""
        x, weight = self._ordered(x), self._weight(x.dtype)
        if x.is_cuda and x.dtype is not torch.float32:
            return invariant_rows(weight)(x, bias)
        result = x.new_empty(len(x), len(weight))
        for row, place in zip(x.split(1), result.split(1), strict=True):
            place.copy_(linear(row, weight, bias))
        return result

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> torch.Tensor:
        """See ``LinearProduct``."""
        if x.is_cuda and x.dtype is not torch.float32:
            return invariant_rows(self._weight(x.dtype)).gated(self._ordered(x), bias, activation)
        return torch.cat([GATES[activation](row) for row in self.forward(x, bias).split(1)])

    def _ordered(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._order is None else x.index_select(1, self._order)

    @property
    def describe(self) -> str:
        """See ``LinearProduct``."""
        return f"{self._what}, dequantized in each step, the same product for any number of rows"
