"""Compute the products of one row together with the norm before them, or with the sum after them.

A kernel that computes the norm of one row, or adds it to another, waits for the kernel before it and starts the next one
for hardly any work. Here every program of a product computes the norm of its whole input, while its part of the weight
arrives, and adds its columns to those of the residual stream.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.activation import Activation
from dovetail.ops.triton.launch import launch, prefetch
from dovetail.ops.triton.matmul import GATE_KINDS, rows_of, store_row
from dovetail.ops.triton.sizes import cdiv

NORMED = (1024, 2048)
"""The sizes of rows whose norm is computed in the product."""


@triton.jit
def _normed_product(
    x, norm, w, y, n, eps, GATED: tl.constexpr, SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr
) -> None:
    tile = tl.program_id(0)
    rows, at = rows_of(tile, n, GATED, BLOCK_N), tl.arange(0, SIZE)
    if PDL:
        gdc_launch_dependents()
    left = tl.load(w + rows.to(tl.int64)[:, None] * SIZE + at[None, :], eviction_policy="evict_first")
    factor = tl.load(norm + at).to(tl.float32)
    if PDL:
        gdc_wait()
    row = tl.load(x + at).to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row, 0) / SIZE + eps)
    out = tl.sum(left.to(tl.float32) * (row * factor)[None, :], 1) * scale
    store_row(y, out, tile, n, GATED, BLOCK_N)


@triton.jit
def _normed_logits(x, norm, w, normed, y, n, eps, SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr) -> None:
    column, at = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, SIZE)
    if PDL:
        gdc_launch_dependents()
    left = tl.load(w + tl.minimum(column, n - 1)[:, None] * SIZE + at[None, :])
    factor = tl.load(norm + at).to(tl.float32)
    if PDL:
        gdc_wait()
    row = tl.load(x + at).to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row, 0) / SIZE + eps)
    row = (row * scale * factor).to(normed.dtype.element_ty)
    out = tl.sum(left.to(tl.float32) * row.to(tl.float32)[None, :], 1)
    tl.store(y + column, out.to(y.dtype.element_ty), column < n)
    if tl.program_id(0) == 0:
        tl.store(normed + at, row)


@triton.jit
def _added_product(
    x,
    w,
    stream,
    y,
    n,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    column, at = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    rows = w + tl.minimum(column, n - 1).to(tl.int64)[:, None] * K
    if PDL:
        gdc_launch_dependents()
    tile = tl.load(rows + at[None, :], eviction_policy="evict_first")
    if PDL:
        if AHEAD:
            line = tl.minimum(BLOCK_K + tl.arange(0, AHEAD) * 64, K - 1)
            prefetch(rows + line[None, :])
        gdc_wait()
    added = tl.load(stream + column, column < n, 0.0).to(tl.float32)
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.static_range(BLOCK_K, K, BLOCK_K):
        following = tl.load(rows + start + at[None, :], eviction_policy="evict_first")
        total += tile.to(tl.float32) * tl.load(x + start - BLOCK_K + at).to(tl.float32)[None, :]
        tile = following
    total += tile.to(tl.float32) * tl.load(x + K - BLOCK_K + at).to(tl.float32)[None, :]
    product = tl.sum(total, 1).to(y.dtype.element_ty).to(tl.float32)  # rounded as where a norm adds it
    tl.store(y + column, (added + product).to(y.dtype.element_ty), column < n)


def normed_product(
    x: torch.Tensor, norm: tuple[torch.Tensor, float], weight: torch.Tensor, activation: Activation | None = None
) -> torch.Tensor:
    """Return the product ``[1, n]`` of the norm of ``x [1, size]`` and ``weight [n, size]``, or, with an ``activation``, its
    gate ``[1, n / 2]``. ``norm`` are the weight of the norm and its epsilon. The norm is not rounded. ``size`` is one of ``NORMED``."""
    n, size = weight.shape
    gated = 0 if activation is None else GATE_KINDS[activation]
    y = torch.empty(1, n // 2 if gated else n, dtype=x.dtype, device=x.device)
    launch(
        _normed_product, (cdiv(n, 8),),
        x, norm[0], weight, y, n, norm[1], GATED=gated, SIZE=size, BLOCK_N=8, num_warps=max(2, size // 512),
    )  # fmt: skip
    return y


def normed_logits(
    x: torch.Tensor, norm: tuple[torch.Tensor, float], weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of ``x [1, size]``, and its product ``[1, n]`` with the ``weight [n, size]`` of a router, both rounded to
    the dtype of ``x``. ``size`` is one of ``NORMED``."""
    n, size = weight.shape
    normed, y = torch.empty_like(x), torch.empty(1, n, dtype=x.dtype, device=x.device)
    launch(
        _normed_logits, (cdiv(n, 4),),
        x, norm[0], weight, normed, y, n, norm[1], SIZE=size, BLOCK_N=4, num_warps=4,
    )  # fmt: skip
    return normed, y


def added_product(x: torch.Tensor, weight: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
    """Return ``stream [1, n]`` plus the product of ``x [1, k]`` and ``weight [n, k]``. k is a multiple of 1,024."""
    n, k = weight.shape
    y = torch.empty_like(stream)
    block = 2048 if k % 2048 == 0 else 1024
    launch(
        _added_product, (cdiv(n, 2),),
        x, weight, stream, y, n, K=k, BLOCK_N=2, BLOCK_K=block, AHEAD=min(32, (k - block) // 64), num_warps=4,
    )  # fmt: skip
    return y
