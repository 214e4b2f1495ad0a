"""Multiply with integer weights."""

from __future__ import annotations

import torch
from torch.nn import functional

from dovetail.interfaces.quantization import LinearProduct
from dovetail.layers.linear import DenseProduct
from dovetail.ops.activation import GATES, Activation
from dovetail.ops.integers import Integers, dequantize
from dovetail_quantization.integer_formats import IntegerActivations

_FEWEST = 16
"""cuBLAS multiplies more than this number of rows in int8."""


def make_product(
    weight: Integers,
    order: torch.Tensor | None,
    activations: IntegerActivations,
    static: torch.Tensor | None,
    dtype: torch.dtype,
) -> LinearProduct:
    """Return the product with ``weight``, whose columns belong to the inputs in ``order``. IntegerActivations in ``dtype`` are
    quantized as ``activations`` says, with the scale ``static`` if the checkpoint has one."""
    if activations is not IntegerActivations.WHOLE:
        return Int8Product(weight, static)
    return DequantizedIntegers(weight, order, dtype)


class DequantizedIntegers(DenseProduct):
    """Multiply with a copy of the weight in the dtype of activations."""

    def __init__(self, weight: Integers, order: torch.Tensor | None, dtype: torch.dtype) -> None:
        self._bits = weight.bits
        super().__init__(in_order(dequantize(weight, dtype), order))

    @property
    def describe(self) -> str:
        """See ``LinearProduct``."""
        return f"integers of {self._bits} bits, dequantized when loaded; {super().describe}"


def in_order(weight: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Return a weight whose columns belong to the inputs in ``order`` with columns in the order of the inputs. Of columns
    that belong to the same input, all but one are zeros."""
    if order is None:
        return weight
    result = torch.zeros(len(weight), int(order.max()) + 1, dtype=weight.dtype, device=weight.device)
    return result.index_add_(1, order.long(), weight)


class Int8Product(LinearProduct):
    """Multiply int8 activations with int8 weights that have a scale for each row, and add up in int32. IntegerActivations are
    quantized with a scale for each token, or the ``static`` one."""

    def __init__(self, weight: Integers, static: torch.Tensor | None) -> None:
        self._weight, self._scale = weight.codes.T, weight.scales.reshape(1, -1).float()
        self._static = static

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See ``LinearProduct``."""
        if not len(x):
            return x.new_empty(0, self._weight.shape[1])
        codes, scales = quantized(x, self._static)
        if self._weight.is_cuda and len(x) <= _FEWEST:
            codes = functional.pad(codes, (0, 0, 0, _FEWEST + 1 - len(x)))
        products = torch._int_mm(codes, self._weight)[: len(x)]
        result = (products.float() * scales).mul_(self._scale)
        return (result if bias is None else result.add_(bias)).to(x.dtype)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> torch.Tensor:
        """See ``LinearProduct``."""
        return GATES[activation](self.forward(x, bias))

    @property
    def describe(self) -> str:
        """See ``LinearProduct``."""
        return "int8 weights and activations, torch._int_mm"


def quantized(x: torch.Tensor, static: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 numbers for ``x [tokens, in]`` and their scales, ``[tokens, 1]`` or, if it is given, ``static``."""
    wide = x.float()
    scales = wide.abs().amax(1, keepdim=True).clamp_(min=1e-10) / 127.0 if static is None else static.float()
    return (wide / scales).round_().clamp_(-128, 127).to(torch.int8), scales
