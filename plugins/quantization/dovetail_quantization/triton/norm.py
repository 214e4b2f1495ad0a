"""Compute RMSNorm and quantize it to FP8 (E4M3), one program per row."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.fp8 import divided, scale_of
from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.norm import norm_warps, normed_row
from dovetail.ops.triton.sizes import cdiv, next_power_of_2
from dovetail_quantization.triton.quantize import empty_codes


@triton.jit(do_not_specialize=["rows"])
def _quantized_norm(
    x, residual, weight, static, codes, scales, total, size, rows, x_stride, total_stride, eps, bound,
    ADD: tl.constexpr, PARTS: tl.constexpr, STATIC: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    if PDL:
        gdc_launch_dependents()
    w = tl.load(weight + at, inside, 0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    normed = normed_row(
        x + row * x_stride + at, residual, row * size + at, total + row * total_stride + at, w, inside,
        rows * x_stride, size, eps, total.dtype.element_ty, ADD, PARTS,
    ).to(tl.float32)  # fmt: skip
    groups = tl.reshape(normed, (BLOCK // GROUP, GROUP))
    if STATIC:
        scale = tl.zeros((BLOCK // GROUP,), tl.float32) + tl.load(static)
    else:
        scale = scale_of(tl.max(tl.abs(groups), 1), bound)
    index, count = tl.arange(0, BLOCK // GROUP), tl.cdiv(size, GROUP)
    tl.store(scales + row * count + index, scale, index < count)
    quotients = tl.reshape(divided(groups, scale[:, None]), (BLOCK,))
    tl.store(codes + row * size + at, quotients.to(codes.dtype.element_ty), inside)


def quantized_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    total: torch.Tensor,
    scaling: tuple[int | None, float | None, torch.Tensor | None],
    parts: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what ``quantize``, or ``quantize_static``, would return for the norm of ``x [tokens, width]``, or of ``x + residual``, which is
    written to ``total``; ``total`` is ``x`` otherwise. ``x`` may be the first of several ``parts``, contiguous float32.
    ``scaling`` is (size, bound, static): the size is a power of 2, or None for one scale for each token."""
    (size, bound, static), (tokens, width) = scaling, x.shape
    assert weight.shape == (width,)
    assert x.stride(1) == total.stride(1) == 1
    assert residual is None or (residual.shape == x.shape and residual.is_contiguous())
    codes, scales = empty_codes(x, 1 if size is None else cdiv(width, size))
    if tokens:
        block = next_power_of_2(width)
        warps = norm_warps(block, parts)
        block = block if size is None else max(block, size)
        launch(
            _quantized_norm, (tokens,),
            x, residual, weight, static, codes, scales, total, width, tokens, x.stride(0), total.stride(0), eps,
            math.inf if bound is None else bound,
            ADD=residual is not None, PARTS=parts, STATIC=static is not None, GROUP=block if size is None else size, BLOCK=block,
            num_warps=warps,
        )  # fmt: skip
    return codes.to(torch.float8_e4m3fn), scales
