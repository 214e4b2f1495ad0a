"""Multiply with quantized weights where no kernel here reads them: with a copy in the dtype of activations."""

from __future__ import annotations

import torch

from dovetail.layers.linear import DenseProduct


class DequantizedLinear(DenseProduct):
    """Multiply with a weight ``[out, in]`` that was dequantized when it was loaded. Activations are not quantized. ``what`` describes the
    stored weight."""

    def __init__(self, weight: torch.Tensor, what: str) -> None:
        super().__init__(weight)
        self._what = what

    @property
    def describe(self) -> str:
        """See ``LinearProduct``."""
        return f"{self._what}, dequantized when loaded; {super().describe}"
