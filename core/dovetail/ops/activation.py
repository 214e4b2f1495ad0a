"""Compute the activations of feed-forward layers."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch.nn import functional

from dovetail.ops.cpu.kernels import kernels


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
