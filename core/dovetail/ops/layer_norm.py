"""Compute layer normalisation (Ba et al. 2016, arXiv 1607.06450), one token at a time."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch.nn import functional

from dovetail.ops.parts import Parts


@functools.cache
def _triton() -> ModuleType:
    from dovetail.ops.triton import norm

    return norm


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Return ``(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias`` over the last dimension. ``x [tokens, size]``
    is contiguous except in the token dimension."""
    if x.is_cuda:
        return _triton().layer_norm(x, weight, bias, eps)
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Return ``layer_norm(x + residual)`` of contiguous ``x, residual [tokens, size]``. Overwrites ``x`` with the
    sum."""
    if x.is_cuda:
        return _triton().layer_norm(x, weight, bias, eps, residual)
    return functional.layer_norm(x.add_(residual), weight.shape, weight, bias, eps)


def add_parts_layer_norm(
    parts: Parts, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(layer_norm(x + residual), x + residual)`` of contiguous ``residual [tokens, size]``, where x is the sum
    of ``parts``, rounded to the dtype of ``residual``. Mutates nothing."""
    if residual.is_cuda:
        return _triton().add_parts_layer_norm(parts.addends, residual, weight, bias, eps)
    total = added_up(parts.addends, residual.dtype)
    return add_layer_norm(total, residual, weight, bias, eps), total


def added_up(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum of float32 ``parts [parts, tokens, size]`` in their order, rounded to ``dtype``."""
    return functools.reduce(torch.add, parts.unbind()).to(dtype)
