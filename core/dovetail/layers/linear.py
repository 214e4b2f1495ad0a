"""Linear layers, several projections of one input fused into one parameter."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dovetail.layers.base import Layer, parameter
from dovetail.ops.linear import column_linear, columns_pay, linear, panel_linear, row_panels


class Linear(Layer):
    """``x [tokens, in] @ weight [out, in].T + bias [out]``."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = parameter(out_features, in_features)
        self.bias = parameter(out_features) if bias else None
        self._operands: tuple[torch.Tensor, torch.Tensor | None]
        self._panels: torch.Tensor | None = None
        self._by_columns = False

    def prepare(self) -> None:
        """See ``Layer.prepare``."""
        weight = self.weight
        self._operands = (weight, self.bias)
        float32_cpu = weight.device.type == "cpu" and weight.dtype is torch.float32
        self._by_columns = float32_cpu and torch.backends.mkl.is_available()
        self._panels = row_panels(weight, torch.get_num_threads()) if self._by_columns else None
        super().prepare()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[tokens, in]`` -> ``[tokens, out]``, which may be stored by columns. Mutates nothing."""
        if not self.prepared:
            self.prepare()
        weight, bias = self._operands
        if self._by_columns:
            rows = x.shape[0]
            if rows == 1:
                panels = self._panels
                return linear(x, weight, bias) if panels is None else panel_linear(x, panels, bias)
            if columns_pay(rows):
                return column_linear(x, weight, bias)
        return linear(x, weight, bias)


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
