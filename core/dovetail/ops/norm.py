"""Compute root mean square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467)."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch.nn import functional

from dovetail.ops.cpu.kernels import kernels
from dovetail.ops.parts import Parts


@functools.cache
def _triton() -> ModuleType:
    from dovetail.ops.triton import norm

    return norm


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension.

    ``x`` is ``[tokens, size]`` with ``weight [size]``, or ``[tokens, heads, size]`` with ``weight [heads, size]``;
    contiguous except in the token dimension. The weight has the dtype of ``x`` or is float32 (a norm whose weight is not
    rounded); this holds for all functions of this module.
    """
    compiled = kernels(x.dtype) if x.device.type == "cpu" else None
    if compiled is not None:
        return compiled.rms_norm(x, weight, eps)
    if x.is_cuda:
        return _triton().rms_norm(x, weight, eps)
    if weight.dtype is not x.dtype:
        return (functional.rms_norm(x.float(), weight.shape[-1:], None, eps) * weight).to(x.dtype)
    if weight.ndim == 1:
        return functional.rms_norm(x, weight.shape, weight, eps)
    return functional.rms_norm(x, weight.shape[1:], None, eps) * weight


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``rms_norm(x + residual)`` of contiguous ``x, residual [tokens, size]``. Overwrites ``x`` with the sum."""
    compiled = kernels(x.dtype) if x.device.type == "cpu" else None
    if compiled is not None:
        return compiled.rms_norm(x, weight, eps, residual)
    if x.is_cuda:
        return _triton().rms_norm(x, weight, eps, residual)
    return rms_norm(x.add_(residual), weight, eps)


def add_parts_rms_norm(
    parts: Parts, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(rms_norm(x + residual), x + residual)`` of contiguous ``residual [tokens, size]``, where x is the sum
    of ``parts``, rounded to the dtype of ``residual``. The returned sum has the same bits as the sum of
    ``add_rms_norm``; the norm may have other bits. Mutates nothing.
    """
    if residual.is_cuda:
        return _triton().add_parts_rms_norm(parts.addends, residual, weight, eps)
    total = functools.reduce(torch.add, parts.addends.unbind()).to(residual.dtype)
    return add_rms_norm(total, residual, weight, eps), total
