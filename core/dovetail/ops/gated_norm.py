"""Compute root mean square normalisation of groups of channels together with a SiLU gate."""

from __future__ import annotations

import torch
from torch.nn import functional


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, group_size: int, *, norm_first: bool
) -> torch.Tensor:
    """Return ``norm(x * silu(gate)) * weight``, or ``norm(x) * weight * silu(gate)`` with ``norm_first``, in a new tensor
    ``[tokens, size]`` with the dtype of ``x``.

    ``x`` and ``gate`` are ``[tokens, size]``, contiguous except in the token dimension, ``weight`` is ``[size]``. Each
    group of ``group_size`` adjacent channels is normalised by itself. All arithmetic is float32, rounded once.
    """
    if x.is_cuda:
        from dovetail.ops.triton.gated_norm import gated_rms_norm as kernel

        return kernel(x, gate, weight, eps, group_size, norm_first=norm_first)
    opened = functional.silu(gate.float())
    values = x.float() if norm_first else x.float() * opened
    normed = functional.rms_norm(values.unflatten(1, (-1, group_size)), (group_size,), None, eps).flatten(1)
    normed = normed * weight.float()
    return (normed * opened if norm_first else normed).to(x.dtype)
