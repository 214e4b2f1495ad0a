"""Compute root mean square normalisation and layer normalisation, one program per row. Sums, and products that are given
in parts, are rounded to the dtype; everything else is float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.sizes import next_power_of_2


@triton.jit
def normed_row(
    x, residual, at, total, weight, inside, part_stride, size, eps, dtype: tl.constexpr, ADD: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Return the norm of a row in ``dtype``. ``x``, ``residual + at`` and ``total`` are the addresses of its elements, of
    which those ``inside`` belong to it. With ``ADD``, ``total`` receives the sum of both. With ``PARTS``, ``x`` is the first of
    this number of addends, which are ``part_stride`` apart."""
    row_x = tl.load(x, inside, 0.0).to(tl.float32)
    if PARTS:
        for part in tl.static_range(1, PARTS):
            row_x += tl.load(x + part * part_stride, inside, 0.0)
        row_x = row_x.to(dtype).to(tl.float32)
    if ADD:
        added = tl.load(residual + at, inside, 0.0).to(tl.float32)
        added = (row_x + added).to(dtype)
        tl.store(total, added, inside)
        row_x = added.to(tl.float32)
    scale = tl.rsqrt(tl.sum(row_x * row_x, 0) / size + eps)
    return (row_x * scale * weight).to(dtype)


def norm_warps(block: int, parts: int) -> int:
    """Return the number of warps that compute the norm of a row of up to ``block`` elements. Parts need more loads at
    once."""
    return min(32, max(1, block // 128)) if parts else min(16, max(1, block // 512))


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x, residual, weight, out, total, size, rows, heads, x_stride, total_stride, eps,
    ADD: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
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
    normed = normed_row(
        x + token * x_stride + head * size + at, residual, row * size + at,
        total + token * total_stride + head * size + at, w, inside, rows * x_stride, size, eps, out.dtype.element_ty, ADD, PARTS,
    )  # fmt: skip
    tl.store(out + row * size + at, normed, inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``ops.norm.rms_norm``, or ``ops.norm.add_rms_norm`` if ``residual`` is given."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm(x, weight, eps, out, residual, x)
    return out


def add_parts_rms_norm(
    parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``ops.norm.add_parts_rms_norm``."""
    assert parts.dtype == torch.float32
    assert parts.is_contiguous()
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    _norm(parts[0], weight, eps, out, residual, total, len(parts))
    return out, total


def _norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    total: torch.Tensor,
    parts: int = 0,
) -> None:
    """Launch the kernel. ``x`` may be the first of several ``parts``."""
    tokens, size = x.shape[0], x.shape[-1]
    heads = 1 if x.ndim == 2 else x.shape[1]
    assert weight.shape == x.shape[1:]
    assert x.stride(-1) == 1
    assert residual is None or (residual.shape == x.shape and residual.is_contiguous())
    if tokens:
        block = next_power_of_2(size)
        launch(
            _rms_norm, (tokens * heads,),
            x, residual, weight, out, total, size, tokens, heads, x.stride(0), total.stride(0), eps,
            ADD=residual is not None, PARTS=parts, BLOCK=block,
            num_warps=norm_warps(block, parts),
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _layer_norm(
    x, residual, weight, bias, out, total, size, rows, x_stride, eps,
    ADD: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    if PDL:
        gdc_launch_dependents()
    w = tl.load(weight + at, inside, 0.0).to(tl.float32)
    if BIAS:
        b = tl.load(bias + at, inside, 0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    source = x + row * x_stride + at
    row_x = tl.load(source, inside, 0.0).to(tl.float32)
    if PARTS:
        for part in tl.static_range(1, PARTS):
            row_x += tl.load(source + part * rows * x_stride, inside, 0.0)
        row_x = row_x.to(out.dtype.element_ty).to(tl.float32)
    if ADD:
        added = tl.load(residual + row * size + at, inside, 0.0).to(tl.float32)
        added = (row_x + added).to(out.dtype.element_ty)
        tl.store(total + row * size + at, added, inside)
        row_x = added.to(tl.float32)
    centred = tl.where(inside, row_x - tl.sum(row_x, 0) / size, 0.0)
    result = centred * tl.rsqrt(tl.sum(centred * centred, 0) / size + eps) * w
    if BIAS:
        result += b
    tl.store(out + row * size + at, result.to(out.dtype.element_ty), inside)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``ops.layer_norm.layer_norm``, or ``ops.layer_norm.add_layer_norm`` if ``residual`` is given."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _layer(x, weight, bias, eps, out, residual, x)
    return out


def add_parts_layer_norm(
    parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``ops.layer_norm.add_parts_layer_norm``."""
    assert parts.dtype == torch.float32
    assert parts.is_contiguous()
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    _layer(parts[0], weight, bias, eps, out, residual, total, len(parts))
    return out, total


def _layer(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    total: torch.Tensor,
    parts: int = 0,
) -> None:
    """Launch ``_layer_norm``. ``x`` may be the first of several ``parts``."""
    tokens, size = x.shape
    assert weight.shape == (size,)
    assert bias is None or bias.shape == (size,)
    assert x.stride(1) == 1
    assert residual is None or (residual.shape == x.shape and residual.is_contiguous() and total.is_contiguous())
    if tokens:
        block = next_power_of_2(size)
        launch(
            _layer_norm, (tokens,),
            x, residual, weight, bias, out, total, size, tokens, x.stride(0), eps,
            ADD=residual is not None, PARTS=parts, BIAS=bias is not None, BLOCK=block,
            num_warps=norm_warps(block, parts),
        )  # fmt: skip
