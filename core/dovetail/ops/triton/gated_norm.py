"""Compute root mean square normalisation of groups of channels together with a SiLU gate, one program for several groups,
so that each thread reads 16 bytes at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.sizes import cdiv, next_power_of_2


@triton.jit
def _gated_rms_norm(
    x, gate, weight, out, count, groups, group_size, x_stride, gate_stride, eps,
    NORM_FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)[None, :]
    inside = (row < count)[:, None] & (at < group_size)
    token, first = (row // groups).to(tl.int64), row % groups * group_size
    if PDL:
        gdc_launch_dependents()
    factor = tl.load(weight + first[:, None] + at, inside, 0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    value = tl.load(x + (token * x_stride + first)[:, None] + at, inside, 0.0).to(tl.float32)
    opened = tl.load(gate + (token * gate_stride + first)[:, None] + at, inside, 0.0).to(tl.float32)
    opened = opened * tl.sigmoid(opened)
    if not NORM_FIRST:
        value = value * opened
    result = value * tl.rsqrt(tl.sum(value * value, 1) / group_size + eps)[:, None] * factor
    if NORM_FIRST:
        result = result * opened
    tl.store(out + row.to(tl.int64)[:, None] * group_size + at, result.to(out.dtype.element_ty), inside)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, group_size: int, *, norm_first: bool
) -> torch.Tensor:
    """Compute ``ops.gated_norm.gated_rms_norm``."""
    assert x.stride(1) == gate.stride(1) == 1
    assert weight.is_contiguous()
    (tokens, size), out = x.shape, torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens:
        block, groups = next_power_of_2(group_size), size // group_size
        rows = max(1, 2048 // block)  # whatever the number of tokens, so that it does not change a result
        launch(
            _gated_rms_norm, (cdiv(tokens * groups, rows),),
            x, gate, weight, out, tokens * groups, groups, group_size, x.stride(0), gate.stride(0), eps,
            NORM_FIRST=norm_first, ROWS=rows, BLOCK=block, num_warps=min(16, max(4, block // 512)),
        )  # fmt: skip
    return out
