"""Rotary position embedding of queries and keys (Su et al. 2021, arXiv 2104.09864), halves layout."""

from __future__ import annotations

import torch


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``x [tokens, heads, d]``: element i pairs with i + d / 2.

    ``cos`` and ``sin [tokens, 1, d]`` are those of the tokens' positions, both halves of ``sin`` signed: ``[-s, s]``.
    Returns a new tensor.
    """
    return torch.roll(x, x.shape[-1] // 2, -1).mul_(sin).addcmul_(x, cos)
