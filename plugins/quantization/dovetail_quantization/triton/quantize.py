"""Quantize activations to FP8 (E4M3), with a float32 scale for each token or for each group of its elements."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.interfaces.quantization import Activation
from dovetail.ops.triton.activation import gelu_tanh
from dovetail.ops.triton.fp8 import divided, scale_of
from dovetail.ops.triton.launch import INTERPRETED, launch
from dovetail.ops.triton.sizes import cdiv, next_power_of_2

BLOCK = 4096
_STATIC_BLOCK = 1024
_GATES: tuple[Activation, ...] = ("silu", "gelu_tanh")


@triton.jit
def _load(x, token, width, at, inside, GATE: tl.constexpr):
    """Return elements of a row of ``x``, or, with ``GATE``, of the gate of a row ``[gate, up]``, rounded to the dtype."""
    if GATE == 0:
        part = tl.load(x + token * width + at, inside, 0.0)
    else:
        gate = tl.load(x + token * 2 * width + at, inside, 0.0).to(tl.float32)
        up = tl.load(x + (token * 2 + 1) * width + at, inside, 0.0).to(tl.float32)
        if GATE == 1:
            part = (gate * tl.sigmoid(gate) * up).to(x.dtype.element_ty)
        else:
            part = (gelu_tanh(gate) * up).to(x.dtype.element_ty)
    return part.to(tl.float32)


@triton.jit
def _quantize(x, out, scales, width, size, bound, GATE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr) -> None:
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    last = tl.minimum(group * size + size, width)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    largest = 0.0
    for begin in range(0, size, BLOCK):
        at = group * size + begin + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.max(tl.abs(_load(x, token, width, at, at < last, GATE)), 0))
    scale = scale_of(largest, bound)
    tl.store(scales + token * tl.num_programs(1) + group, scale)
    for begin in range(0, size, BLOCK):
        at = group * size + begin + tl.arange(0, BLOCK)
        part = divided(_load(x, token, width, at, at < last, GATE), scale)
        tl.store(out + token * width + at, part.to(out.dtype.element_ty), at < last)


@triton.jit
def _quantize_static(x, static, out, scales, width, GATE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr) -> None:
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(static)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    part = _load(x, token, width, at, at < width, GATE)
    tl.store(out + token * width + at, divided(part, scale).to(out.dtype.element_ty), at < width)
    if tl.program_id(1) == 0:
        tl.store(scales + token, scale)


def quantize_static(
    x: torch.Tensor, static: torch.Tensor, gate: Activation | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return contiguous ``x [tokens, width]`` divided by ``static`` in FP8, and this scale for each token, float32
    ``[tokens, 1]``. Quotients beyond the largest number become it. For ``gate`` see ``quantize``. Mutates nothing."""
    assert x.is_contiguous()
    tokens, width = len(x), _width(x, gate)
    out, scales = empty_codes(x, 1, width)
    if tokens:
        block = min(_STATIC_BLOCK, next_power_of_2(width))
        grid = (tokens, cdiv(width, block))
        launch(_quantize_static, grid, x, static, out, scales, width, GATE=_kind(gate), BLOCK=block)
    return out.to(torch.float8_e4m3fn), scales


def _width(x: torch.Tensor, gate: Activation | None) -> int:
    return x.shape[1] if gate is None else x.shape[1] // 2


def _kind(gate: Activation | None) -> int:
    """Return the constant GATE of the kernels."""
    return 0 if gate is None else _GATES.index(gate) + 1


def empty_codes(x: torch.Tensor, groups: int, width: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for codes ``[tokens, width]``, by default of the shape of ``x``, and the scales of their groups.
    Triton's interpreter rounds numbers just below a power of two to half of it: there the codes are float32, and torch
    rounds them afterwards."""
    dtype = torch.float32 if INTERPRETED else torch.float8_e4m3fn
    codes = torch.empty(len(x), x.shape[1] if width is None else width, dtype=dtype, device=x.device)
    return codes, torch.empty(len(x), groups, dtype=torch.float32, device=x.device)


def quantize(
    x: torch.Tensor, size: int | None = None, bound: float | None = None, gate: Activation | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return contiguous ``x [tokens, width]`` in FP8, and its scales: float32 ``[tokens, groups]``, one for each ``size``
    elements of a token, by default for the whole token. ``x`` is about the first times the second; elements beyond
    ``bound`` count as ``bound``. With ``gate``, ``x`` is ``[tokens, 2 * width]``, and its gate is quantized instead
    (``ops.activation.GATES``). Mutates nothing."""
    assert x.is_contiguous()
    tokens, width = len(x), _width(x, gate)
    size = width if size is None else size
    groups = cdiv(width, size)
    out, scales = empty_codes(x, groups, width)
    if tokens:
        block = min(BLOCK, next_power_of_2(size))
        launch(
            _quantize,
            (tokens, groups),
            x,
            out,
            scales,
            width,
            size,
            math.inf if bound is None else bound,
            GATE=_kind(gate),
            BLOCK=block,
            num_warps=8 if block > 1024 else 4,
        )
    return out.to(torch.float8_e4m3fn), scales
