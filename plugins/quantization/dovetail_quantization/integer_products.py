"""Multiply with integer weights."""

from __future__ import annotations

import torch
from torch.nn import functional

from dovetail.interfaces.quantization import LinearProduct
from dovetail.ops.activation import GATES, Activation
from dovetail.ops.integers import BLOCK, Integers, dequantize
from dovetail_quantization.coded_product import CodedProduct
from dovetail_quantization.dequantized import DequantizedLinear
from dovetail_quantization.integer_formats import IntegerActivations
from dovetail_quantization.invariant_products import InvariantLinear

_FEWEST = 16
"""Up to this number of rows, CUDA has no products of int8 numbers: they are multiplied with activations of 16 bits."""


def make_product(
    weight: Integers,
    order: torch.Tensor | None,
    activations: IntegerActivations,
    static: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    batch_invariant: bool = False,
) -> LinearProduct:
    """Return the product with ``weight``, whose columns belong to the inputs in ``order``. Activations in ``dtype`` are
    quantized as ``activations`` says, with the scale ``static`` if the checkpoint has one. With ``batch_invariant``, the bits of a row do
    not depend on the other rows."""
    if activations is not IntegerActivations.WHOLE:
        return Int8Product(weight, static, batch_invariant=batch_invariant)
    if batch_invariant:
        return _invariant(weight, order, dtype)
    if not weight.codes.is_cuda:
        plain = in_order(dequantize(weight, dtype), order)
        return DequantizedLinear(plain, f"integers of {weight.bits} bits")
    return IntegerProduct(weight, order)


def _invariant(weight: Integers, order: torch.Tensor | None, dtype: torch.dtype) -> LinearProduct:
    what = f"integers of {weight.bits} bits"
    if not weight.codes.is_cuda:
        plain = in_order(dequantize(weight, dtype), order)
        return InvariantLinear(lambda _: plain, dtype, what)
    from dovetail_quantization.triton import integer_rows

    held = integer_rows.with_words(weight)
    write = dequantize if weight.group % BLOCK else integer_rows.plain_weight
    return InvariantLinear(lambda dtype: write(held, dtype), dtype, what, order)


def in_order(weight: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Return a weight whose columns belong to the inputs in ``order`` with columns in the order of the inputs. Of columns
    that belong to the same input, all but one are zeros."""
    if order is None:
        return weight
    result = torch.zeros(len(weight), int(order.max()) + 1, dtype=weight.dtype, device=weight.device)
    return result.index_add_(1, order.long(), weight)


class IntegerProduct(CodedProduct):
    """Multiply on CUDA, with activations of 16 bits. The kernels are in ``triton.integer_rows``."""

    def __init__(self, weight: Integers, order: torch.Tensor | None) -> None:
        from dovetail_quantization.triton import integer_rows

        self._weight = weight = integer_rows.with_words(weight)
        self._order = order
        self._rows = rows = integer_rows.integer_rows(weight)
        self._dequantize = dequantize if weight.group % BLOCK else integer_rows.plain_weight
        what = f"integers of {weight.bits} bits, groups of {weight.group}"
        most = 0 if rows is None else rows.most_rows
        super().__init__((len(weight.codes), weight.columns), most, what, in_parts=rows is not None)

    def is_few(self, x: torch.Tensor) -> bool:
        """See ``CodedProduct``."""
        return self._rows is not None and self._rows.is_few(x)

    def few_rows(
        self, x: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None = None
    ) -> torch.Tensor:
        """See ``CodedProduct``."""
        assert self._rows is not None
        return self._rows.forward(x, bias) if activation is None else self._rows.gated(x, bias, activation)

    def few_rows_in_parts(self, x: torch.Tensor) -> torch.Tensor | None:
        """See ``CodedProduct``."""
        assert self._rows is not None
        return self._rows.parts(x)

    def dequantized(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """See ``CodedProduct``."""
        weight = self._weight
        if rows.stop - rows.start < len(weight.codes):
            scales, zeros = (None if one is None else one[:, rows].contiguous() for one in weight[1:])
            assert scales is not None
            weight = Integers(weight.codes[rows], scales, zeros)
        return self._dequantize(weight, dtype)

    def inputs(self, x: torch.Tensor) -> torch.Tensor:
        """See ``CodedProduct``."""
        return x if self._order is None else x.index_select(1, self._order)


class Int8Product(LinearProduct):
    """Multiply int8 activations with int8 weights that have a scale for each row, and add up in int32. Activations are
    quantized with a scale for each token, or the ``static`` one; on CUDA those of up to ``_FEWEST`` rows are not, unless the product is
    ``batch_invariant``: rows of zeros are then added. Sums of integers are exact, so that the bits of a row do not depend on the others."""

    def __init__(self, weight: Integers, static: torch.Tensor | None, *, batch_invariant: bool = False) -> None:
        self._weight, self._scale = weight.codes.T, weight.scales.reshape(1, -1).float()
        self._static = static
        few = weight.codes.is_cuda and not batch_invariant
        self._few = IntegerProduct(weight, None) if few else None
        self._fewest = 2 * _FEWEST if weight.codes.is_cuda and batch_invariant else 0

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See ``LinearProduct``."""
        if not len(x):
            return x.new_empty(0, self._weight.shape[1])
        if self._few is not None and len(x) <= _FEWEST:
            return self._few.forward(x, bias)
        codes, scales = quantized(x, self._static)
        if len(x) < self._fewest:
            codes = functional.pad(codes, (0, 0, 0, self._fewest - len(x)))
        result = (torch._int_mm(codes, self._weight)[: len(x)].float() * scales).mul_(self._scale)
        return (result if bias is None else result.add_(bias)).to(x.dtype)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> torch.Tensor:
        """See ``LinearProduct``."""
        if self._few is not None and 0 < len(x) <= _FEWEST:
            return self._few.gated(x, bias, activation)
        return GATES[activation](self.forward(x, bias))

    @property
    def describe(self) -> str:
        """See ``LinearProduct``."""
        few = "" if self._few is None else f", up to {_FEWEST} rows with activations of 16 bits ({self._few.describe})"
        return f"int8 weights and activations, torch._int_mm{few}"


def quantized(x: torch.Tensor, static: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 numbers for ``x [tokens, in]`` and their scales, ``[tokens, 1]`` or, if it is given, ``static``."""
    wide = x.float()
    scales = wide.abs().amax(1, keepdim=True).clamp_(min=1e-10) / 127.0 if static is None else static.float()
    return (wide / scales).round_().clamp_(-128, 127).to(torch.int8), scales
