"""Compute root mean square normalisation of groups of channels together with a SiLU gate, one program per group of a
token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.launch import launch


@triton.jit
def _gated_rms_norm(
    x, gate, weight, out, size, group_size, x_stride, gate_stride, eps,
    NORM_FIRST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < group_size
    channel = tl.program_id(1) * group_size + at
    if PDL:
        gdc_launch_dependents()
    factor = tl.load(weight + channel, inside, 0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    value = tl.load(x + token * x_stride + channel, inside, 0.0).to(tl.float32)
    opened = tl.load(gate + token * gate_stride + channel, inside, 0.0).to(tl.float32)
    opened = opened * tl.sigmoid(opened)
    if not NORM_FIRST:
        value = value * opened
    result = value * tl.rsqrt(tl.sum(value * value, 0) / group_size + eps) * factor
    if NORM_FIRST:
        result = result * opened
    tl.store(out + token * size + channel, result.to(out.dtype.element_ty), inside)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, group_size: int, *, norm_first: bool
) -> torch.Tensor:
    """Compute ``ops.gated_norm.gated_rms_norm``."""
    assert x.stride(1) == gate.stride(1) == 1
    assert weight.is_contiguous()
    (tokens, size), out = x.shape, torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens:
        block = triton.next_power_of_2(group_size)
        launch(
            _gated_rms_norm, (tokens, size // group_size),
            x, gate, weight, out, size, group_size, x.stride(0), gate.stride(0), eps,
            NORM_FIRST=norm_first, BLOCK=block, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return out
