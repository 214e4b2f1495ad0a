"""Compute the step sizes of state space models."""

from __future__ import annotations

import torch
from torch.nn import functional

from dovetail.interfaces.state_space import ScanChannels, SSDHeads


def head_step_sizes(dt: torch.Tensor, heads: SSDHeads) -> torch.Tensor:
    """Return the step sizes of ``dt [..., heads]`` in float32."""
    return functional.softplus(dt.float() + heads.dt_bias).clamp(*heads.limits)


def channel_step_sizes(dt: torch.Tensor, channels: ScanChannels) -> torch.Tensor:
    """Return the step sizes of ``dt [tokens, channels]`` in float32."""
    return functional.softplus(dt.float() + channels.dt_bias)
