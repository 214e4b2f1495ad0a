"""Quantize activations to FP8, alone or in the kernel that computes them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType

import torch

from dovetail.interfaces.quantization import Activation, ActivationQuantizer, QuantizedActivations


@functools.cache
def _norm() -> ModuleType:
    from dovetail_quantization.triton import norm

    return norm


@functools.cache
def _quantize() -> ModuleType:
    from dovetail_quantization.triton import quantize

    return quantize


@dataclass(frozen=True, slots=True)
class Fp8Quantizer(ActivationQuantizer):
    """Give each ``size`` elements of a token a scale, by default all of them. Elements beyond ``bound`` count as it. The
    scales are float32 ``[tokens, groups]``. With ``static``, all scales are this number, a tensor without dimensions, and
    larger quotients than FP8 has become the largest."""

    size: int | None = None
    bound: float | None = None
    few_rows: int = 0  # pyright: ignore[reportIncompatibleVariableOverride]
    static: torch.Tensor | None = None

    def quantize(self, x: torch.Tensor) -> QuantizedActivations:
        """See ``ActivationQuantizer``."""
        return _as_read(self._codes(x), x)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> QuantizedActivations:
        """See ``ActivationQuantizer``."""
        return self._normed(x, weight, eps, None, x)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> QuantizedActivations:
        """See ``ActivationQuantizer``."""
        return self._normed(x, weight, eps, residual, x)

    def add_parts_rms_norm(
        self, parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[QuantizedActivations, torch.Tensor]:
        """See ``ActivationQuantizer``."""
        total = torch.empty_like(residual)
        return self._normed(parts[0], weight, eps, residual, total, len(parts)), total

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> QuantizedActivations:
        """See ``ActivationQuantizer``."""
        return _as_read(self._codes(gate_up, activation), gate_up)

    def _normed(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None,
        total: torch.Tensor,
        parts: int = 0,
    ) -> QuantizedActivations:
        scaling = (self.size, self.bound, self.static)
        return _as_read(_norm().quantized_norm(x, weight, eps, residual, total, scaling, parts), total)

    def _codes(self, x: torch.Tensor, gate: Activation | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        if self.static is not None:
            return _quantize().quantize_static(x, self.static, gate)
        return _quantize().quantize(x, self.size, self.bound, gate)


def _as_read(quantized: tuple[torch.Tensor, torch.Tensor], like: torch.Tensor) -> QuantizedActivations:
    codes, scales = quantized
    return QuantizedActivations(codes, scales, like.dtype)
