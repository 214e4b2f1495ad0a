"""Linear layers, several projections of one input fused into one parameter."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dovetail.layers.base import Layer, parameter
from dovetail.ops.linear import linear, panel_linear, row_panels


class Linear(Layer):
    """``x [tokens, in] @ weight [out, in].T + bias [out]``."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = parameter(out_features, in_features)
        self.bias = parameter(out_features) if bias else None
        self._operands: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]

    def prepare(self) -> None:
        """See ``Layer.prepare``."""
        on_cpu = self.weight.device.type == "cpu"
        panels = row_panels(self.weight, torch.get_num_threads()) if on_cpu else None
        self._operands = (self.weight, self.bias, panels)
        super().prepare()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[tokens, in]`` -> ``[tokens, out]``."""
        if not self.prepared:
            self.prepare()
        weight, bias, panels = self._operands
        if panels is not None and x.shape[0] == 1:
            return panel_linear(x, panels, bias)
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
