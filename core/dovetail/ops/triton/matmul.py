"""Matrix products of few rows: ``x [m, k] @ w [n, k].T``, bound by reading ``w`` once.

One row: plain multiply and add in float32, the weights straight to registers. Up to 64 rows: tensor cores with the weight
as the left operand, whose tiles are at least 64 high, and the rows of ``x`` as a narrow right one. Where there are few
tiles the product is split along k; the last program of a tile to finish adds up the parts, in their order, so results
are the same every time. Both kernels ask for weights before they wait for the kernel that makes ``x`` (see ``launch``).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch.nn import functional
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.tuning import MAX_PARTS, MAX_ROWS, MAX_TILES, Tile, tile_of


@triton.jit
def _prefetch(address) -> None:
    """Ask for the lines at ``address``, a tensor of pointers, to be brought to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [address.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _one_row(
    x, w, bias, y, n, k,
    EVEN: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    last = row if EVEN else tl.minimum(row, n - 1)
    at = tl.arange(0, BLOCK_K)
    source = w + last.to(tl.int64)[:, None] * k + at[None, :]
    if PDL:
        gdc_launch_dependents()
    tile = tl.load(source, eviction_policy="evict_first")
    if PDL:
        if AHEAD:
            line = tl.minimum(BLOCK_K + tl.arange(0, AHEAD) * 64, k - 1)
            _prefetch(w + last.to(tl.int64)[:, None] * k + line[None, :])
        gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in range(BLOCK_K, k, BLOCK_K):
        following = tl.load(source + start, eviction_policy="evict_first")
        factor = tl.load(x + start - BLOCK_K + at).to(tl.float32)
        total += tile.to(tl.float32) * factor[None, :]
        tile = following
    factor = tl.load(x + k - BLOCK_K + at).to(tl.float32)
    total += tile.to(tl.float32) * factor[None, :]
    out = tl.sum(total, 1)
    if BIAS:
        out += tl.load(bias + last).to(tl.float32)
    if EVEN:
        tl.store(y + row, out.to(y.dtype.element_ty))
    else:
        tl.store(y + row, out.to(y.dtype.element_ty), row < n)


@triton.jit
def _few_rows(
    x, w, bias, y, parts, arrived, m, n, k, span, splits,
    EVEN: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    tile, part = tl.program_id(0), tl.program_id(1)
    row = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    last = row if EVEN else tl.minimum(row, n - 1)
    token = tl.arange(0, BLOCK_M)
    at = tl.arange(0, BLOCK_K)
    source = w + last.to(tl.int64)[:, None] * k + part * span + at[None, :]
    tokens = x + token[:, None] * k + part * span + at[None, :]
    present = token[:, None] < m
    if PDL:
        gdc_launch_dependents()
        if AHEAD:
            line = tl.minimum(tl.arange(0, AHEAD) * 64, span - 1)
            _prefetch(w + last.to(tl.int64)[:, None] * k + part * span + line[None, :])
        gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, span, BLOCK_K):
        left = tl.load(source + start, eviction_policy="evict_first")
        right = tl.load(tokens + start, present, 0.0)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    finished = True
    if SPLIT:
        inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + token[None, :]
        size: tl.constexpr = BLOCK_N * BLOCK_M
        mine = parts + tile.to(tl.int64) * splits * size + inner
        tl.store(mine + part * size, total)
        tl.debug_barrier()
        finished = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits - 1
        if finished:
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for other in range(splits):
                total += tl.load(mine + other * size, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
    if finished:
        if BIAS:
            total += tl.load(bias + last).to(tl.float32)[:, None]
        target = y + token[None, :].to(tl.int64) * n + row[:, None]
        tl.store(target, total.to(y.dtype.element_ty), (token[None, :] < m) & (row[:, None] < n))


class Workspace:
    """Where split products of one device keep their parts. Products that share it must not run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.parts = torch.empty(MAX_PARTS, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


@functools.cache
def workspace(device: torch.device) -> Workspace:
    """The workspace of a device: of its one stream of forward passes."""
    return Workspace(device)


def matmul(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile, space: Workspace
) -> torch.Tensor:
    """``ops.linear.linear`` of contiguous ``x [m, k]``, ``weight [n, k]``, cut by ``tile``, whose ``block_k * split``
    divides k, for at most ``tile.block_m`` rows."""
    (m, k), n = x.shape, weight.shape[0]
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(n, tile.block_n)
    even = n % tile.block_n == 0
    if tile.block_m == 1:
        launch(
            _one_row, (tiles,),
            x, weight, bias, y, n, k,
            EVEN=even, BIAS=bias is not None, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
            AHEAD=tile.ahead, num_warps=tile.warps,
        )  # fmt: skip
        return y
    launch(
        _few_rows, (tiles, tile.split),
        x, weight, bias, y, space.parts, space.arrived, m, n, k, k // tile.split, tile.split,
        EVEN=even, BIAS=bias is not None, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        SPLIT=tile.split > 1, AHEAD=tile.ahead, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


class FewRows:
    """The products of one weight with up to ``MAX_ROWS`` rows, each number of rows by what was fastest."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight.detach()
        self._space = workspace(weight.device)
        self._tiles = [None, *(tile_of(rows, *weight.shape) for rows in range(1, MAX_ROWS + 1))]

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``ops.linear.linear`` of ``x [m, k]`` with m up to ``MAX_ROWS``."""
        tile = self._tiles[x.shape[0]]
        if tile is None:
            return functional.linear(x, self._weight, bias)
        assert x.is_contiguous()
        return matmul(x, self._weight, bias, tile, self._space)


def supported(weight: torch.Tensor) -> bool:
    """Whether there are kernels for this weight: 16 bits, contiguous, on the compute capability they were measured on."""
    return (
        weight.dtype in (torch.bfloat16, torch.float16)
        and weight.is_contiguous()
        and weight.numel() > 0
        and torch.cuda.get_device_capability(weight.device) == (9, 0)
    )
