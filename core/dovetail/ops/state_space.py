"""Define the parameters of the recurrences of state space models: Mamba-2 (``ops.ssd``) and Mamba
(``ops.selective_scan``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True, slots=True, eq=False)
class SSDHeads:
    """Hold the parameters of heads, float32 ``[heads]`` each: the negative rates ``a``, the factors ``d`` of the inputs
    that outputs contain, and what is added to the step sizes. ``limits`` are the smallest and the largest step size."""

    a: torch.Tensor
    d: torch.Tensor
    dt_bias: torch.Tensor
    limits: tuple[float, float] = (0.0, float("inf"))

    def step_sizes(self, dt: torch.Tensor) -> torch.Tensor:
        """Return the step sizes of ``dt [..., heads]`` in float32."""
        return functional.softplus(dt.float() + self.dt_bias).clamp(*self.limits)


@dataclass(frozen=True, slots=True, eq=False)
class ScanChannels:
    """Hold the parameters of channels, float32 and contiguous: the negative rates ``a [channels, state_size]``, the
    factors ``d [channels]`` of the inputs that outputs contain, and ``dt_bias [channels]``, which is added to the step
    sizes."""

    a: torch.Tensor
    d: torch.Tensor
    dt_bias: torch.Tensor

    def step_sizes(self, dt: torch.Tensor) -> torch.Tensor:
        """Return the step sizes of ``dt [tokens, channels]`` in float32."""
        return functional.softplus(dt.float() + self.dt_bias)
