"""Rotary position embedding of queries and keys (Su et al. 2021, arXiv 2104.09864), halves layout."""

from __future__ import annotations

import torch

from dovetail.ops.cpu.kernels import kernels


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``x [tokens, heads, d]``, contiguous but for the tokens: element i pairs with i + d / 2.

    ``cos`` and ``sin [tokens, 1, d]`` are those of the tokens' positions, both halves of ``sin`` signed: ``[-s, s]``; their
    strides are equal. Returns a new tensor.
    """
    compiled = kernels(x.dtype) if x.device.type == "cpu" else None
    if compiled is not None:
        return compiled.rotary(x, cos, sin)
    return torch.roll(x, x.shape[-1] // 2, -1).mul_(sin).addcmul_(x, cos)
