"""Linear layers, several projections of one input fused into one parameter."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dovetail.layers.base import Layer, parameter
from dovetail.ops.linear import linear, packed, packed_linear, panel_linear, row_panels


class Linear(Layer):
    """``x [tokens, in] @ weight [out, in].T + bias [out]``."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = parameter(out_features, in_features)
        self.bias = parameter(out_features) if bias else None
        self._operands: tuple[torch.Tensor, torch.Tensor | None]
        self._panels: torch.Tensor | None = None
        self._packed: torch.Tensor | None = None
        self._one_row_as_is = False

    def prepare(self) -> None:
        """See ``Layer.prepare``. On the CPU it keeps a second copy of the weight, in the order its kernels read."""
        weight = self.weight
        self._operands = (weight, self.bias)
        self._packed = packed(weight)
        float32_cpu = weight.device.type == "cpu" and weight.dtype is torch.float32
        self._one_row_as_is = float32_cpu and torch.backends.mkl.is_available()
        self._panels = row_panels(weight, torch.get_num_threads()) if self._one_row_as_is else None
        super().prepare()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[tokens, in]`` -> ``[tokens, out]``, contiguous. Mutates nothing."""
        if not self.prepared:
            self.prepare()
        weight, bias = self._operands
        if self._packed is None or (self._one_row_as_is and x.shape[0] == 1):
            return linear(x, weight, bias) if self._panels is None else panel_linear(x, self._panels, bias)
        return packed_linear(x, self._packed, bias)


class FusedLinear(Linear):
    """Several projections of one input as one parameter: ``parts`` names them and their widths, in order."""

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias)
        self._rows: dict[str, tuple[int, int]] = {}
        start = 0
        for name, size in parts.items():
            self._rows[name] = (start, size)
            start += size

    def rows(self, part: str) -> tuple[int, int]:
        """Start and size of a part's rows in ``weight`` and ``bias``: what a ``WeightTarget`` wants to know."""
        return self._rows[part]
