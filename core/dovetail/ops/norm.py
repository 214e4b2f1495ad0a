"""Root mean square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, of any device and dtype."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


class NormScale(NamedTuple):
    """What ``rms_norm_cpu`` needs of a norm of ``d`` elements: ``scale`` float32 is weight * sqrt(d), broadcast against
    x; ``floor`` float32 ``[]`` is sqrt(d * eps)."""

    scale: torch.Tensor
    floor: torch.Tensor


def norm_scale(weight: torch.Tensor, eps: float) -> NormScale:
    """The ``NormScale`` of ``weight [..., d]``; a copy, to be made again when the weight changes."""
    d = weight.shape[-1]
    return NormScale(weight.float() * math.sqrt(d), torch.tensor(math.sqrt(d * eps), device=weight.device))


def rms_norm_cpu(x: torch.Tensor, norm: NormScale) -> torch.Tensor:
    """``rms_norm`` in as few operations as torch allows: mean(x^2) + eps = (|x|^2 + floor^2) / d. Exact to float32."""
    scale, floor = norm
    if x.dtype is torch.float32:
        return x.div(torch.linalg.vector_norm(x, 2, -1, True).hypot_(floor)).mul_(scale)
    wide = x.float()  # operations on operands of two dtypes are not vectorised
    return wide.div_(torch.linalg.vector_norm(wide, 2, -1, True).hypot_(floor)).mul_(scale).to(x.dtype)
