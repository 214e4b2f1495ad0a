"""Compute the activations of feed-forward layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType

import torch
from torch.nn import functional

from dovetail.interfaces.quantization import Activation
from dovetail.ops.cpu.kernels import kernels

__all__ = ["GATES", "Activation", "gate_rows", "gelu_tanh_mul", "sigmoid_mul", "silu_mul", "soft_cap"]


@functools.cache
def _triton() -> ModuleType:
    from dovetail.ops.triton import activation

    return activation


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute SwiGLU's gate (Shazeer 2020, arXiv 2002.05202): map contiguous ``gate_up [tokens, 2 * n]`` to
    ``silu(gate) * up``, ``[tokens, n]``."""
    compiled = kernels(gate_up.dtype) if gate_up.device.type == "cpu" else None
    if compiled is not None:
        return compiled.silu_mul(gate_up)
    if gate_up.is_cuda:
        return _triton().silu_mul(gate_up)
    width = gate_up.shape[1] // 2
    gate, up = torch.split_with_sizes(gate_up, [width, width], 1)
    return functional.silu(gate).mul_(up)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute GEGLU's gate (Shazeer 2020) with the approximation of GELU by tanh: map contiguous ``gate_up [tokens, 2 *
    n]`` to ``gelu(gate) * up``, ``[tokens, n]``."""
    compiled = kernels(gate_up.dtype) if gate_up.device.type == "cpu" else None
    if compiled is not None:
        return compiled.gelu_tanh_mul(gate_up)
    if gate_up.is_cuda:
        return _triton().gelu_tanh_mul(gate_up)
    width = gate_up.shape[1] // 2
    gate, up = torch.split_with_sizes(gate_up, [width, width], 1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


GATES: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}
)
"""Map an activation to the function of ``gate_up`` that computes its gate."""


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return ``sigmoid(gate) * x``, ``[tokens, n]`` in the dtype of ``x``. Both are contiguous except in the token
    dimension. Mutates nothing."""
    if x.is_cuda:
        return _triton().sigmoid_mul(x, gate)
    return (gate.float().sigmoid_() * x).to(x.dtype)


def gate_rows(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return ``sigmoid(x @ weight.T) * y``, ``[tokens, width]`` in the dtype of ``y [tokens, width]``: a gate for each row of contiguous
    ``x [tokens, n]``, with ``weight [1, n]``. Sums are float32, rounded once. Mutates nothing."""
    if x.is_cuda:
        return _triton().gate_rows(x, weight, y)
    return (functional.linear(x.float(), weight.float()).sigmoid_() * y).to(y.dtype)


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Return ``cap * tanh(x / cap)`` of contiguous ``x``, computed in float32. Overwrites ``x`` and returns it."""
    if x.is_cuda:
        return _triton().soft_cap(x, cap)
    if x.dtype is torch.float32:
        return x.div_(cap).tanh_().mul_(cap)
    return x.copy_((x.float() / cap).tanh() * cap)
