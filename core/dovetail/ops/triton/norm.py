"""Root mean square normalisation, one program per row. Sums are rounded to the dtype, all else is float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.launch import launch


@triton.jit
def _rms_norm(
    x, residual, weight, out, size, heads, x_stride, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token, head = row // heads, row % heads
    at = tl.arange(0, BLOCK)
    inside = at < size
    if PDL:
        gdc_launch_dependents()
    w = tl.load(weight + head * size + at, inside, 0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    source = x + token * x_stride + head * size + at
    row_x = tl.load(source, inside, 0.0).to(tl.float32)
    if ADD:
        added = tl.load(residual + row * size + at, inside, 0.0).to(tl.float32)
        total = (row_x + added).to(x.dtype.element_ty)
        tl.store(source, total, inside)
        row_x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(row_x * row_x, 0) / size + eps)
    tl.store(out + row * size + at, (row_x * scale * w).to(out.dtype.element_ty), inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """``ops.norm.rms_norm``; with a ``residual``, ``ops.norm.add_rms_norm``."""
    tokens, size = x.shape[0], x.shape[-1]
    heads = 1 if x.ndim == 2 else x.shape[1]
    assert weight.shape == x.shape[1:]
    assert x.stride(-1) == 1
    assert residual is None or (residual.shape == x.shape and residual.is_contiguous())
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens:
        block = triton.next_power_of_2(size)
        launch(
            _rms_norm, (tokens * heads,),
            x, residual, weight, out, size, heads, x.stride(0), eps,
            ADD=residual is not None, BLOCK=block, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return out
