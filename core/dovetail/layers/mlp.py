"""Compute the gated feed-forward layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dovetail.layers.base import Layer
from dovetail.layers.linear import FusedLinear, Linear

if TYPE_CHECKING:
    from dovetail.ops.parts import Parts


class GatedMLP(Layer):
    """Compute ``down(silu(gate(x)) * up(x))``. The projections gate and up are one parameter, ``gate_up``."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> None:
        super().__init__()
        parts = {"gate": intermediate_size, "up": intermediate_size}
        self.gate_up = FusedLinear(hidden_size, parts, bias=bias)
        self.down = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``x [tokens, hidden_size]`` to the same shape. Mutates nothing."""
        return self.down.forward(self.gate_up.gated_forward(x))

    def parts_forward(self, x: torch.Tensor) -> torch.Tensor | Parts:
        """Compute ``forward``, but return ``Parts`` if the kernel computes them. Only ``RMSNorm.add_forward`` accepts
        ``Parts``; it adds them up."""
        return self.down.parts_forward(self.gate_up.gated_forward(x))
