"""Quantize activations to FP8 (E4M3), with a float32 scale for each token or for each group of its elements."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.launch import INTERPRETED, launch

BLOCK = 4096
_STATIC_BLOCK = 1024
LARGEST = tl.constexpr(448.0)


@triton.jit
def _quantize(x, out, scales, width, size, bound, BLOCK: tl.constexpr, PDL: tl.constexpr) -> None:
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    start = token * width + group * size
    last = tl.minimum(size, width - group * size)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    largest = 0.0
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        part = tl.load(x + start + at, at < last, 0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(part), 0))
    largest = tl.minimum(largest, bound)
    scale = tl.where(largest > 0.0, largest / LARGEST, 1.0)
    tl.store(scales + token * tl.num_programs(1) + group, scale)
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        part = tl.load(x + start + at, at < last, 0.0).to(tl.float32)
        part = tl.minimum(tl.maximum(part / scale, -LARGEST), LARGEST)
        tl.store(out + start + at, part.to(out.dtype.element_ty), at < last)


@triton.jit
def _quantize_static(x, static, out, scales, width, BLOCK: tl.constexpr, PDL: tl.constexpr) -> None:
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(static)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.load(x + token * width + at, at < width, 0.0).to(tl.float32)
    part = tl.minimum(tl.maximum(part / scale, -LARGEST), LARGEST)
    tl.store(out + token * width + at, part.to(out.dtype.element_ty), at < width)
    if tl.program_id(1) == 0:
        tl.store(scales + token, scale)


def quantize_static(x: torch.Tensor, static: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return contiguous ``x [tokens, width]`` divided by ``static`` in FP8, and this scale for each token, float32
    ``[tokens, 1]``. Quotients beyond the largest number become it. Mutates nothing."""
    assert x.is_contiguous()
    tokens, width = x.shape
    out, scales = _empty(x, 1)
    if tokens:
        block = min(_STATIC_BLOCK, triton.next_power_of_2(width))
        launch(_quantize_static, (tokens, triton.cdiv(width, block)), x, static, out, scales, width, BLOCK=block)
    return out.to(torch.float8_e4m3fn), scales


def _empty(x: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for the codes of ``x`` and the scales of its groups. Triton's interpreter rounds numbers just below a
    power of two to half of it: there the codes are float32, and torch rounds them afterwards."""
    out = torch.empty(x.shape, dtype=torch.float32 if INTERPRETED else torch.float8_e4m3fn, device=x.device)
    return out, torch.empty(len(x), groups, dtype=torch.float32, device=x.device)


def quantize(x: torch.Tensor, size: int | None = None, bound: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return contiguous ``x [tokens, width]`` in FP8, and its scales: float32 ``[tokens, groups]``, one for each ``size``
    elements of a token, by default for the whole token. ``x`` is about the first times the second; elements beyond
    ``bound`` count as ``bound``. Mutates nothing."""
    assert x.is_contiguous()
    tokens, width = x.shape
    size = width if size is None else size
    groups = triton.cdiv(width, size)
    out, scales = _empty(x, groups)
    if tokens:
        block = min(BLOCK, triton.next_power_of_2(size))
        launch(
            _quantize,
            (tokens, groups),
            x,
            out,
            scales,
            width,
            size,
            math.inf if bound is None else bound,
            BLOCK=block,
            num_warps=8 if block > 1024 else 4,
        )
    return out.to(torch.float8_e4m3fn), scales
