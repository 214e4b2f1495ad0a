"""Activations of the feed-forward layers."""

from __future__ import annotations

import torch
from torch.nn import functional


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU's gate (Shazeer 2020, arXiv 2002.05202): ``silu(gate) * up`` of ``gate_up [tokens, 2 * n]`` -> ``[tokens, n]``."""
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate).mul_(up)
