"""Multiply with FP8 weights."""

from __future__ import annotations

from abc import abstractmethod

import torch

from dovetail.interfaces.quantization import LinearInput, LinearProduct, QuantizedActivations
from dovetail.ops.activation import GATES, Activation
from dovetail.ops.expert_formats import fp8_weight
from dovetail_quantization.dequantized import DequantizedLinear
from dovetail_quantization.fp8_activations import Fp8Quantizer


def make_product(
    weight: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int] | None,
    static: torch.Tensor | None,
    dtype: torch.dtype,
    bound: float | None = None,
) -> LinearProduct:
    """Return the product with ``weight [out, in]`` in FP8 times ``scale``: float32 ``[out]``, or one number for each
    ``block``. ``static`` is the scale of activations if the checkpoint has one. Activations above ``bound`` count as
    ``bound``."""
    if not has_kernels(weight.device):
        return DequantizedLinear(dequantize(weight, scale, block, dtype), "fp8")
    return RowScaled(weight, scale, static, bound) if block is None else BlockScaled(weight, scale, block)


def has_kernels(device: torch.device) -> bool:
    """Return whether ``device`` has products of FP8 numbers."""
    return device.type == "cuda"


def dequantize(
    weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return the weight ``[out, in]`` in ``dtype``."""
    return fp8_weight(weight, scale, block).to(dtype)


class Scaled(LinearProduct):
    """Multiply with a weight on CUDA that has scales. More than ``SPLIT_ROWS`` rows are quantized, by the norm or gate before
    or here. Fewer rows keep their dtype, up to the kernel that multiplies them, unless there is a ``bound`` or the weight
    has no such kernel."""

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, *, bounded: bool = False) -> None:
        from dovetail_quantization.triton import few_rows

        self._quantizer: Fp8Quantizer
        self._rows = few_rows.few_rows(weight, scale)
        self._most_split = 0 if self._rows is None or bounded else few_rows.SPLIT_ROWS
        self._most = 0 if self._rows is None else few_rows.MOST_ROWS
        self.in_parts = self._rows is not None

    def forward(self, x: LinearInput, bias: torch.Tensor | None) -> torch.Tensor:
        """See ``LinearProduct``."""
        x = self._read(x)
        if self._rows is not None and 0 < x.shape[0] <= self._most:
            return self._rows.forward(x, bias)
        assert isinstance(x, QuantizedActivations)
        return self._many_rows(x, bias)

    def gated(self, x: LinearInput, bias: torch.Tensor | None, activation: Activation) -> torch.Tensor:
        """See ``LinearProduct``."""
        x = self._read(x)
        if self._rows is not None and 0 < x.shape[0] <= self._most:
            return self._rows.gated(x, bias, activation)
        return GATES[activation](self.forward(x, bias))

    def parts(self, x: LinearInput) -> torch.Tensor | None:
        """See ``LinearProduct``."""
        if self._rows is not None and 0 < x.shape[0] <= self._most:
            return self._rows.parts(self._read(x))
        return None

    def _read(self, x: LinearInput) -> LinearInput:
        """Return ``x`` as the kernel for this number of rows reads it."""
        if isinstance(x, QuantizedActivations):
            return x
        if 0 < x.shape[0] <= self._most_split and x.element_size() == 2:  # the two parts are as exact as 16 bits
            return x
        return self._quantizer.quantize(x)

    @abstractmethod
    def _many_rows(self, x: QuantizedActivations, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute ``forward``."""


class RowScaled(Scaled):
    """Multiply with a weight that has a scale for each row. Activations are quantized with a scale for each token, or
    with the ``static`` scale of the checkpoint. cuBLAS multiplies many rows (``torch._scaled_mm``)."""

    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor, static: torch.Tensor | None, bound: float | None
    ) -> None:
        super().__init__(weight, scale.float(), bounded=bound is not None)
        self._weight, self._scale = weight.T, scale[None, :].contiguous()
        self._quantizer = self.quantizer = Fp8Quantizer(bound=bound, few_rows=self._most_split, static=static)

    def _many_rows(self, x: QuantizedActivations, bias: torch.Tensor | None) -> torch.Tensor:
        codes, scales, dtype = x
        if not len(codes):
            return torch.empty(0, self._scale.shape[1], dtype=dtype, device=codes.device)
        return torch._scaled_mm(codes, self._weight, scale_a=scales, scale_b=self._scale, bias=bias, out_dtype=dtype)

    @property
    def describe(self) -> str:
        """See ``LinearProduct``."""
        return f"fp8, scales by row, {f'up to {self._most} rows triton, more ' if self._most else ''}cuBLAS"


class BlockScaled(Scaled):
    """Multiply with a weight that has a scale for each block, and activations with a scale for each token and as many
    inputs as a block has."""

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> None:
        from dovetail_quantization.triton.block_product import block_product

        super().__init__(weight, scale)
        self._weight, self._scale, self._block = weight, scale, block
        self._quantizer = self.quantizer = Fp8Quantizer(block[1], few_rows=self._most_split)
        self._multiply = block_product

    def _many_rows(self, x: QuantizedActivations, bias: torch.Tensor | None) -> torch.Tensor:
        codes, scales, dtype = x
        return self._multiply(codes, scales, self._weight, self._scale, self._block, bias, dtype)

    @property
    def describe(self) -> str:
        """See ``LinearProduct``."""
        return f"fp8, scales by block of {self._block[0]} x {self._block[1]}, triton"
