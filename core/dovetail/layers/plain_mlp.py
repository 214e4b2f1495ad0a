"""Compute the feed-forward layer of two products, without a gate."""

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
    from dovetail.ops.parts import Addend


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


_TANH = partial(functional.gelu, approximate="tanh")
PLAIN_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "gelu": functional.gelu,
        "gelu_fast": _TANH,
        "gelu_new": _TANH,
        "gelu_pytorch_tanh": _TANH,
        "quick_gelu": _quick_gelu,
        "relu": functional.relu,
        "silu": functional.silu,
        "swish": functional.silu,
    }
)
"""Map the names of transformers to activations. Those that transformers computes by the same formula are the same."""


class PlainMLP(Layer):
    """Compute ``down(activation(up(x)))``. ``activation`` is a name of ``PLAIN_ACTIVATIONS``. Every rank computes its
    share of the intermediate values."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, mesh: Mesh, activation: str, *, bias: bool = True
    ) -> None:
        super().__init__()
        self.up = ColumnLinear(hidden_size, {"up": intermediate_size}, mesh, bias=bias)
        self.down = row_linear(intermediate_size, hidden_size, mesh, bias=bias)
        self._activation = PLAIN_ACTIVATIONS[activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``x [tokens, hidden_size]`` to the same shape. Mutates nothing."""
        return self.down.forward(self._activation(self.up.forward(x)))

    def parts_forward(self, x: torch.Tensor) -> Addend:
        """Compute ``forward``, but leave it to ``add_forward`` of the next norm to add up parts (see
        ``Linear.parts_forward``)."""
        return self.down.parts_forward(self._activation(self.up.forward(x)))
