"""Compute the gates of feed-forward layers, and soft caps, in float32, rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.sizes import cdiv, next_power_of_2

BLOCK = 1024


@triton.jit
def _silu_mul(gate_up, out, width, BLOCK: tl.constexpr, PDL: tl.constexpr) -> None:
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_up + token * 2 * width + at, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + (token * 2 + 1) * width + at, inside, 0.0).to(tl.float32)
    tl.store(out + token * width + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), inside)


@triton.jit
def gelu_tanh(x):
    """Return GELU, approximated by ``x (1 + tanh(u)) / 2`` with ``u = sqrt(2 / pi) (x + 0.044715 x^3)``, which is ``x
    sigmoid(2 u)``."""
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def _gelu_tanh_mul(gate_up, out, width, BLOCK: tl.constexpr, PDL: tl.constexpr) -> None:
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_up + token * 2 * width + at, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + (token * 2 + 1) * width + at, inside, 0.0).to(tl.float32)
    tl.store(out + token * width + at, (gelu_tanh(gate) * up).to(out.dtype.element_ty), inside)


@triton.jit
def _sigmoid_mul(x, gate, out, width, x_stride, gate_stride, BLOCK: tl.constexpr, PDL: tl.constexpr) -> None:
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    opened = tl.sigmoid(tl.load(gate + token * gate_stride + at, inside, 0.0).to(tl.float32))
    value = tl.load(x + token * x_stride + at, inside, 0.0).to(tl.float32)
    tl.store(out + token * width + at, (opened * value).to(out.dtype.element_ty), inside)


@triton.jit
def _gate_rows(x, weight, y, out, size, width, BLOCK: tl.constexpr, PDL: tl.constexpr) -> None:
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    w = tl.load(weight + at, at < size, 0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = w * tl.load(x + token * size + at, at < size, 0.0).to(tl.float32)
    for first in range(BLOCK, size, BLOCK):
        inside = first + at < size
        w = tl.load(weight + first + at, inside, 0.0).to(tl.float32)
        total += w * tl.load(x + token * size + first + at, inside, 0.0).to(tl.float32)
    opened = tl.sigmoid(tl.sum(total, 0))
    for first in range(0, width, BLOCK):
        inside = first + at < width
        value = tl.load(y + token * width + first + at, inside, 0.0).to(tl.float32)
        tl.store(out + token * width + first + at, (opened * value).to(out.dtype.element_ty), inside)


@triton.jit
def _soft_cap(x, count, cap, BLOCK: tl.constexpr, PDL: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + at, at < count, 0.0).to(tl.float32)
    capped = cap * (2 * tl.sigmoid(2 * value / cap) - 1)
    tl.store(x + at, capped.to(x.dtype.element_ty), at < count)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute ``ops.activation.silu_mul``."""
    return _gate(_silu_mul, gate_up)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute ``ops.activation.gelu_tanh_mul``."""
    return _gate(_gelu_tanh_mul, gate_up)


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Compute ``ops.activation.soft_cap``."""
    assert x.is_contiguous()
    count = x.numel()
    if count:
        launch(_soft_cap, (cdiv(count, BLOCK),), x, count, cap, BLOCK=BLOCK, num_warps=4)
    return x


def _gate(kernel: object, gate_up: torch.Tensor) -> torch.Tensor:
    assert gate_up.is_contiguous()
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        block = min(BLOCK, next_power_of_2(width))
        launch(kernel, (tokens, cdiv(width, block)), gate_up, out, width, BLOCK=block, num_warps=4)
    return out


def gate_rows(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Compute ``ops.activation.gate_rows``."""
    assert x.is_contiguous()
    assert y.is_contiguous()
    assert weight.shape == (1, x.shape[1])
    assert weight.is_contiguous()
    out = torch.empty_like(y)
    if len(x):
        block = min(4096, next_power_of_2(x.shape[1]))
        launch(
            _gate_rows,
            (len(x),),
            x,
            weight,
            y,
            out,
            x.shape[1],
            y.shape[1],
            BLOCK=block,
            num_warps=8 if block > 2048 else 4,
        )
    return out


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Compute ``ops.activation.sigmoid_mul``."""
    assert x.shape == gate.shape
    assert x.stride(1) == gate.stride(1) == 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        grid = (len(x), cdiv(x.shape[1], BLOCK))
        launch(_sigmoid_mul, grid, x, gate, out, x.shape[1], x.stride(0), gate.stride(0), BLOCK=BLOCK)
    return out
