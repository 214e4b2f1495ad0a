"""Compute LayerNorm of hidden states, with the residual added first."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dovetail.interfaces.model import WeightTarget
from dovetail.layers.base import Layer, parameter
from dovetail.ops.layer_norm import add_layer_norm, add_parts_layer_norm, added_up, layer_norm
from dovetail.ops.parts import Addend, Parts, RankAddend, Summed


class LayerNorm(Layer):
    """Compute ``(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias`` over the last dimension, each token alone. It
    takes the place of an ``RMSNorm``."""

    def __init__(self, size: int, eps: float, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = parameter(size)
        self.bias = parameter(size) if bias else None
        self.eps = eps
        self._operands: tuple[torch.Tensor, torch.Tensor | None, float]

    def prepare(self) -> None:
        """See ``Layer.prepare``."""
        self._operands = (self.weight, self.bias, self.eps)
        super().prepare()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``x [tokens, size]`` to the same shape. Mutates nothing."""
        if not self.prepared:
            self.prepare()
        return layer_norm(x, *self._operands)

    def add_forward(self, x: Addend, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``RMSNorm.add_forward``."""
        if residual is None:
            assert isinstance(x, torch.Tensor)
            return self.forward(x), x
        if not self.prepared:
            self.prepare()
        if isinstance(x, Parts):
            return add_parts_layer_norm(x, residual, *self._operands)
        if isinstance(x, Summed):
            return layer_norm(x.total, *self._operands), x.total
        if isinstance(x, RankAddend):
            own = x.x if x.x.ndim == 2 else added_up(x.x, residual.dtype)
            x = x.tp.all_reduce(own)
        return add_layer_norm(x, residual, *self._operands), x

    def targets(self, checkpoint_prefix: str, parameter_prefix: str) -> Iterator[tuple[str, WeightTarget]]:
        """Yield the targets of the weight and the bias. Names in the checkpoint begin with ``checkpoint_prefix``,
        parameters of the model with ``parameter_prefix``."""
        for field in ("weight", "bias"):
            if getattr(self, field) is not None:
                yield f"{checkpoint_prefix}.{field}", WeightTarget(f"{parameter_prefix}.{field}")
