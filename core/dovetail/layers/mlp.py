"""Compute feed-forward layers: of two products, and gated ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from dovetail.layers.base import Layer
from dovetail.layers.linear import ColumnLinear, row_linear

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.ops.activation import Activation
    from dovetail.ops.parts import Addend


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    return functional.relu(x).square()


_TANH = partial(functional.gelu, approximate="tanh")
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "gelu": functional.gelu,
        "gelu_fast": _TANH,
        "gelu_new": _TANH,
        "gelu_pytorch_tanh": _TANH,
        "quick_gelu": _quick_gelu,
        "relu": functional.relu,
        "relu2": _squared_relu,
        "silu": functional.silu,
        "swish": functional.silu,
    }
)
"""Map the names of transformers to activations. Those that transformers computes by the same formula are the same."""


class GatedMLP(Layer):
    """Compute ``down(activation(gate(x)) * up(x))``. The projections gate and up are one parameter, ``gate_up``.
    Every rank computes its share of the intermediate values."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        mesh: Mesh,
        *,
        bias: bool = False,
        activation: Activation = "silu",
    ) -> None:
        super().__init__()
        parts = {"gate": intermediate_size, "up": intermediate_size}
        self.gate_up = ColumnLinear(hidden_size, parts, mesh, bias=bias)
        self.gate_up.activation = activation
        self.down = row_linear(intermediate_size, hidden_size, mesh, bias=bias)

    def connect(self) -> None:
        """See ``Layer.connect``."""
        quantizer = self.down.product.quantizer
        if quantizer is not None:
            self.gate_up.quantize_gate(quantizer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``x [tokens, hidden_size]`` to the same shape. Mutates nothing."""
        return self.down.forward(self.gate_up.gated_forward(x))

    def parts_forward(self, x: torch.Tensor) -> Addend:
        """Compute ``forward``, but leave it to ``RMSNorm.add_forward`` to add up parts (see
        ``Linear.parts_forward``)."""
        return self.down.parts_forward(self.gate_up.gated_forward(x))

    def addend_forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what this rank adds to ``forward`` (see ``Linear.addend_forward``). The caller may overwrite it."""
        return self.down.addend_forward(self.gate_up.gated_forward(x))


class MLP(Layer):
    """Compute ``down(activation(up(x)))``. ``activation`` is a name of ``ACTIVATIONS``. Every rank computes its
    share of the intermediate values."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, mesh: Mesh, activation: str, *, bias: bool = True
    ) -> None:
        super().__init__()
        self.up = ColumnLinear(hidden_size, {"up": intermediate_size}, mesh, bias=bias)
        self.down = row_linear(intermediate_size, hidden_size, mesh, bias=bias)
        self._activation = ACTIVATIONS[activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``x [tokens, hidden_size]`` to the same shape. Mutates nothing."""
        return self.down.forward(self._activation(self.up.forward(x)))

    def parts_forward(self, x: torch.Tensor) -> Addend:
        """Compute ``forward``, but leave it to ``add_forward`` of the next norm to add up parts (see
        ``Linear.parts_forward``)."""
        return self.down.parts_forward(self._activation(self.up.forward(x)))

    def addend_forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what this rank adds to ``forward`` (see ``Linear.addend_forward``). The caller may overwrite it."""
        return self.down.addend_forward(self._activation(self.up.forward(x)))
