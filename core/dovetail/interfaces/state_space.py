"""Define the parameters of the recurrences of state space models: Mamba-2 and Mamba."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class SSDHeads:
    """Hold the parameters of heads, float32 ``[heads]`` each: the negative rates ``a``, the factors ``d`` of the inputs
    that outputs contain, and what is added to the step sizes. ``limits`` are the smallest and the largest step size."""

    a: torch.Tensor
    d: torch.Tensor
    dt_bias: torch.Tensor
    limits: tuple[float, float] = (0.0, float("inf"))


@dataclass(frozen=True, slots=True, eq=False)
class ScanChannels:
    """Hold the parameters of channels, float32 and contiguous: the negative rates ``a [channels, state_size]``, the
    factors ``d [channels]`` of the inputs that outputs contain, and ``dt_bias [channels]``, which is added to the step
    sizes."""

    a: torch.Tensor
    d: torch.Tensor
    dt_bias: torch.Tensor
