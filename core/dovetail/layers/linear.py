"""Define linear layers. Several projections of one input are fused into one parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from dovetail.errors import ConfigError
from dovetail.layers.base import Layer, parameter
from dovetail.ops.activation import silu_mul
from dovetail.ops.cpu.kernels import Kernels, kernels
from dovetail.ops.linear import compiled_rows, few_rows, invariant_rows, linear, packed, packed_linear

if TYPE_CHECKING:
    from dovetail.ops.parts import Parts
    from dovetail.ops.triton.invariant import InvariantRows
    from dovetail.ops.triton.matmul import FewRows


class Linear(Layer):
    """Compute ``x [tokens, in] @ weight [out, in].T + bias [out]``. With ``batch_invariant``, the bits of a row do not
    depend on the number of rows."""

    batch_invariant = False

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = parameter(out_features, in_features)
        self.bias = parameter(out_features) if bias else None
        self._operands: tuple[torch.Tensor, torch.Tensor | None]
        self._packed: torch.Tensor | None = None
        self._compiled: Kernels | None = None
        self._compiled_rows = 0
        self._few_rows: FewRows | InvariantRows | None = None

    def prepare(self) -> None:
        """See ``Layer.prepare``. On the CPU the layer keeps a second copy of the weight, in the order that oneDNN's
        kernels read; on CUDA it chooses the kernels for few rows. Raises ``ConfigError`` if ``batch_invariant`` is set
        and there are no such products for the weight.
        """
        weight = self.weight
        self._operands = (weight, self.bias)
        self._packed = packed(weight)
        self._compiled_rows = compiled_rows(weight)
        self._compiled = kernels(weight.dtype) if self._compiled_rows else None
        self._few_rows = invariant_rows(weight) if self.batch_invariant else few_rows(weight)
        super().prepare()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map contiguous ``x [tokens, in]`` to ``[tokens, out]``. Mutates nothing."""
        if not self.prepared:
            self.prepare()
        weight, bias = self._operands
        if self._compiled is not None and x.shape[0] <= self._compiled_rows:
            return self._compiled.product(x, weight, bias)
        if self._few_rows is not None and x.shape[0] <= self._few_rows.most_rows:
            return self._few_rows(x, bias)
        return linear(x, weight, bias) if self._packed is None else packed_linear(x, self._packed, bias)

    def parts_forward(self, x: torch.Tensor) -> torch.Tensor | Parts:
        """Compute ``forward``, but return ``Parts`` if the kernel computes them. Only ``RMSNorm.add_forward`` accepts
        ``Parts``; it adds them up."""
        if not self.prepared:
            self.prepare()
        if self._few_rows is not None and self.bias is None and x.shape[0] <= self._few_rows.most_rows:
            parts = self._few_rows.parts(x)
            if parts is not None:
                return parts
        return self.forward(x)

    def gated_forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute ``silu_mul(forward(x))``: map contiguous ``x [tokens, in]`` to ``[tokens, out / 2]``. Mutates
        nothing."""
        if not self.prepared:
            self.prepare()
        if self._few_rows is not None and x.shape[0] <= self._few_rows.most_rows:
            return self._few_rows.gated(x, self._operands[1])
        return silu_mul(self.forward(x))


class FusedLinear(Linear):
    """Compute several projections of one input with one parameter. ``parts`` names them and their widths, in order."""

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias)
        self._rows: dict[str, tuple[int, int]] = {}
        start = 0
        for name, size in parts.items():
            self._rows[name] = (start, size)
            start += size

    def rows(self, part: str) -> tuple[int, int]:
        """Return the start and the size of a part's rows in ``weight`` and ``bias``, as ``WeightTarget`` takes them."""
        return self._rows[part]


def make_batch_invariant(model: nn.Module) -> None:
    """Make all linear layers of ``model`` compute each row to the same bits regardless of the other rows, from their
    next ``prepare`` on. Raises ``ConfigError`` if there are no such products for a weight, and if a module outside of
    ``dovetail.layers`` has parameters: in its products, rows may depend on each other.
    """
    for name, module in model.named_modules():
        if not isinstance(module, Layer) and any(True for _ in module.parameters(recurse=False)):
            raise ConfigError(
                f"batch_invariant is true, and {name or 'the model'} is a {type(module).__name__} with its own "
                "parameters; allowed: layers of dovetail.layers. Set batch_invariant: false"
            )
        if isinstance(module, Linear):
            invariant_rows(module.weight)
            module.batch_invariant = True
            module.prepared = False
