"""Compute matrix products of few rows, ``x [m, k] @ w [n, k].T``. They take the time to read ``w`` once.

One row: plain multiplication and addition in float32, with the weights loaded directly to registers. Up to 128 rows:
tensor cores with the weight as the left operand, whose tiles are at least 64 high, and the rows of ``x`` as a narrow
right operand. If there are few tiles, the product is split along k. The last program of a tile to finish adds up the
parts in their order, so that results are the same every time; or the parts are left to the norm that follows
(``ops.parts``). Both kernels may end in SwiGLU's gate, which adds no cost there.

Both kernels request weights before they wait for the kernel that makes ``x`` (see ``launch``). The one for few rows
either prefetches lines (``ProductTile.ahead``) or loads them (``ProductTile.early``), never both. With ``early``, the
pipeline of its weights is full before the wait. ``x`` must not be read before the wait, and is therefore kept out of
that pipeline, in registers, one tile ahead.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch.nn import functional
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.activation import GATES, Activation
from dovetail.ops.parts import Parts
from dovetail.ops.triton.activation import gelu_tanh
from dovetail.ops.triton.launch import launch, prefetch, processors
from dovetail.ops.triton.sizes import cdiv
from dovetail.ops.triton.tuning import MAX_PARTS, MAX_ROWS, MAX_TILES, ProductTile, tile_of


@triton.jit
def wait() -> None:
    """Execute ``gdc_wait`` as inline assembly. Newer versions of Triton (3.9) have an operation for it, but do not
    pipeline a loop that contains it."""
    tl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def rows_of(tile, n, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the rows of the weight that a tile reads. If GATED, the n rows are the rows of the gates followed by the
    rows of the gated values, and a tile reads pairs of a gate and its value."""
    local = tl.arange(0, BLOCK_N)
    if GATED:
        return tl.minimum(tile * (BLOCK_N // 2) + local // 2, n // 2 - 1) + local % 2 * (n // 2)
    return tl.minimum(tile * BLOCK_N + local, n - 1)


@triton.jit
def gate(opens, up, GATED: tl.constexpr):
    """Return the gate of two tiles, ``silu(opens) * up``, or with another function (see ``GATE_KINDS``)."""
    if GATED == 2:
        return gelu_tanh(opens) * up
    return opens * tl.sigmoid(opens) * up


@triton.jit
def finish_row(y, bias, rows, total, tile, n, GATED: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr) -> None:
    """Add up ``total [BLOCK_N, ...]`` of one tile and its bias, and write the sums or their gate to ``y [n]``."""
    out = tl.sum(total, 1)
    if BIAS:
        out += tl.load(bias + rows).to(tl.float32)
    store_row(y, out, tile, n, GATED, BLOCK_N)


@triton.jit
def store_row(y, out, tile, n, GATED: tl.constexpr, BLOCK_N: tl.constexpr) -> None:
    """Write the sums ``out [BLOCK_N]`` of one tile, or their gate, to ``y [n]``."""
    if GATED:
        opens, up = tl.split(tl.reshape(out, [BLOCK_N // 2, 2]))
        column = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        tl.store(y + column, gate(opens, up, GATED).to(y.dtype.element_ty), column < n // 2)
    else:
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        tl.store(y + column, out.to(y.dtype.element_ty), column < n)


@triton.jit(do_not_specialize=["tiles"])
def _one_row(
    x, w, bias, y, n, k, tiles,
    GATED: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr, PERSISTENT: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    index = tl.program_id(0)
    rows = rows_of(index, n, GATED, BLOCK_N)
    at = tl.arange(0, BLOCK_K)
    source = w + rows.to(tl.int64)[:, None] * k + at[None, :]
    if PDL:
        gdc_launch_dependents()
    tile = tl.load(source, eviction_policy="evict_first")
    if PDL:
        if AHEAD:
            line = tl.minimum(BLOCK_K + tl.arange(0, AHEAD) * 64, k - 1)
            prefetch(w + rows.to(tl.int64)[:, None] * k + line[None, :])
        gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    if PERSISTENT:
        programs, start = tl.num_programs(0), 0
        steps = tl.cdiv(tiles - index, programs) * (k // BLOCK_K)
        for step in range(steps):
            wraps = start + BLOCK_K == k
            next_index = index + tl.where(wraps, programs, 0)
            next_start = tl.where(wraps, 0, start + BLOCK_K)
            next_rows = rows_of(next_index, n, GATED, BLOCK_N)
            source = w + next_rows.to(tl.int64)[:, None] * k + (next_start + at)[None, :]
            more = (next_start + at)[None, :] < tl.where(step + 1 < steps, k, 0)
            following = tl.load(source, more, 0.0, eviction_policy="evict_first")
            factor = tl.load(x + start + at).to(tl.float32)
            total += tile.to(tl.float32) * factor[None, :]
            if wraps:
                finish_row(y, bias, rows, total, index, n, GATED, BIAS, BLOCK_N)
                total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
            tile, rows, index, start = following, next_rows, next_index, next_start
    else:
        for start in range(BLOCK_K, k, BLOCK_K):
            following = tl.load(source + start, eviction_policy="evict_first")
            factor = tl.load(x + start - BLOCK_K + at).to(tl.float32)
            total += tile.to(tl.float32) * factor[None, :]
            tile = following
        factor = tl.load(x + k - BLOCK_K + at).to(tl.float32)
        total += tile.to(tl.float32) * factor[None, :]
        finish_row(y, bias, rows, total, index, n, GATED, BIAS, BLOCK_N)


@triton.jit
def store_rows(y, total, tile, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, stride=None) -> None:
    """Write ``total [BLOCK_N, BLOCK_M]`` to the columns of ``tile`` in ``y [m, n]``, whose rows are ``stride`` elements apart,
    by default n."""
    token = tl.arange(0, BLOCK_M)[None, :]
    column = (tile * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    apart = n if stride is None else stride
    tl.store(y + token.to(tl.int64) * apart + column, total.to(y.dtype.element_ty), (token < m) & (column < n))


@triton.jit
def around(start, first, span, BLOCK_K: tl.constexpr):
    """Return the offset, within its ``span``, of round ``start`` of a program that begins at ``first``. Programs begin
    at different offsets, so that they do not all request the same lines of ``x`` at once."""
    place = start + first
    return tl.multiple_of(place - tl.where(place >= span, span, 0), BLOCK_K)


@triton.jit
def finish_rows(
    total, y, bias, parts, arrived, rows, tile, part, m, n,
    GATED: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    IN_PARTS: tl.constexpr, stride=None,
) -> None:  # fmt: skip
    """Write the part ``total [BLOCK_N, BLOCK_M]`` of a tile, whose rows of the weight are ``rows``: to ``y [parts, m, n]``
    if IN_PARTS. Otherwise the last program of the tile to finish adds up its SPLIT parts in their order, and the bias, and
    writes the sum or its gate to ``y``, whose rows are ``stride`` elements apart if it is given. ``parts`` and ``arrived`` are
    those of ``Workspace``."""
    token = tl.arange(0, BLOCK_M)
    finished = not IN_PARTS
    if IN_PARTS:
        store_rows(y + part.to(tl.int64) * m * n, total, tile, m, n, BLOCK_M, BLOCK_N)
    elif SPLIT > 1:
        inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + token[None, :]
        size: tl.constexpr = BLOCK_N * BLOCK_M
        mine = parts + tile.to(tl.int64) * (SPLIT * size) + inner
        tl.store(mine + part * size, total)
        tl.debug_barrier()
        finished = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLIT - 1
        if finished:
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for other in tl.static_range(SPLIT):
                total += tl.load(mine + other * size, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
    if finished:
        if BIAS:
            total += tl.load(bias + rows).to(tl.float32)[:, None]
        if GATED:
            opens, up = tl.split(tl.permute(tl.reshape(total, [BLOCK_N // 2, 2, BLOCK_M]), (0, 2, 1)))
            store_rows(y, gate(opens, up, GATED), tile, m, n // 2, BLOCK_M, BLOCK_N // 2, stride)
        else:
            store_rows(y, total, tile, m, n, BLOCK_M, BLOCK_N, stride)


@triton.jit(do_not_specialize=["m"])
def _few_rows(
    x, w, bias, y, parts, arrived, m, n, k, span,
    GATED: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr, IN_ORDER: tl.constexpr, IN_PARTS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    tile, part = tl.program_id(0), tl.program_id(1)
    rows = rows_of(tile, n, GATED, BLOCK_N)
    token = tl.arange(0, BLOCK_M)
    at = tl.arange(0, BLOCK_K)
    source = w + rows.to(tl.int64)[:, None] * k + part * span + at[None, :]
    tokens = x + token[:, None] * k + part * span + at[None, :]
    present = token[:, None] < m
    if PDL:
        gdc_launch_dependents()
        if AHEAD:
            line = tl.minimum(tl.arange(0, AHEAD) * 64, span - 1)
            prefetch(w + rows.to(tl.int64)[:, None] * k + part * span + line[None, :])
        if not EARLY:
            gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if EARLY:
        first = 0 if IN_ORDER else tl.multiple_of(tile * BLOCK_K % span, BLOCK_K)
        right = tl.zeros([BLOCK_M, BLOCK_K], x.dtype.element_ty)
        for start in range(0, span, BLOCK_K):
            if start == 0:  # waits inside the loop; the pipeline's first loads of ``left`` come before the loop
                if PDL:
                    wait()
                right = tl.load(tokens + first, present, 0.0)
            more = token[:, None] < tl.where(start + BLOCK_K < span, m, 0)
            following = tl.load(tokens + around(start + BLOCK_K, first, span, BLOCK_K), more, 0.0)
            left = tl.load(source + around(start, first, span, BLOCK_K), eviction_policy="evict_first")
            total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
            right = following
    else:
        for start in range(0, span, BLOCK_K):
            left = tl.load(source + start, eviction_policy="evict_first")
            right = tl.load(tokens + start, present, 0.0)
            total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    finish_rows(total, y, bias, parts, arrived, rows, tile, part, m, n, GATED, BIAS, BLOCK_M, BLOCK_N, SPLIT, IN_PARTS)


GATE_KINDS: dict[Activation, int] = {"silu": True, "gelu_tanh": 2}
"""Map an activation to the constant ``GATED`` of the kernels that compute its gate."""


class Workspace:
    """Hold the parts of split products. Products that share a workspace must not run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.parts = torch.empty(MAX_PARTS, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


def workspace(device: torch.device) -> Workspace:
    """Return the workspace of the current stream of ``device``. Kernels of one stream run one after the other, and each engine has a
    stream of its own, on which it is built."""
    return _workspace(device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)


@functools.cache
def _workspace(device: torch.device, stream: int) -> Workspace:
    return Workspace(device)


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: ProductTile,
    space: Workspace,
    gated: int = False,
    *,
    in_order: bool = False,
    in_parts: bool = False,
) -> torch.Tensor:
    """Compute ``ops.linear.linear`` of contiguous ``x [m, k]`` and ``weight [n, k]`` for at most ``tile.block_m`` rows.
    ``tile.block_k * tile.split`` must divide k.

    With ``gated``, one of ``GATE_KINDS``, also compute the gate of the product, for even n. With ``in_order`` (several
    rows), every part is added up from its beginning. With ``in_parts`` (several rows, no bias), return float32
    ``[split, m, n]``, whose sum over the first dimension is the product.
    """
    (m, k), n = x.shape, weight.shape[0]
    if in_parts:
        y = torch.empty(tile.split, m, n, dtype=torch.float32, device=x.device)
    else:
        y = torch.empty(m, n // 2 if gated else n, dtype=x.dtype, device=x.device)
    tiles = cdiv(n, tile.block_n)
    if tile.block_m == 1:
        programs = min(tiles, tile.per_sm * processors(x.device)) if tile.per_sm else tiles
        launch(
            _one_row, (programs,),
            x, weight, bias, y, n, k, tiles,
            GATED=gated, BIAS=bias is not None, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
            AHEAD=tile.ahead, PERSISTENT=tile.per_sm > 0, num_warps=tile.warps,
        )  # fmt: skip
        return y
    launch(
        _few_rows, (tiles, tile.split),
        x, weight, bias, y, space.parts, space.arrived, m, n, k, k // tile.split,
        GATED=gated, BIAS=bias is not None, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        SPLIT=tile.split, AHEAD=tile.ahead, EARLY=tile.early, IN_ORDER=in_order, IN_PARTS=in_parts, num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
    return y


class FewRows:
    """Compute the products of one weight with up to ``most_rows`` rows, with the fastest measured kernel for each
    number of rows."""

    most_rows = MAX_ROWS

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight.detach()
        self._space = workspace(weight.device)
        self._tiles = [None, *(tile_of(rows, *weight.shape) for rows in range(1, MAX_ROWS + 1))]  # by rows

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute ``ops.linear.linear`` of ``x [m, k]``, with m up to ``most_rows``."""
        tile = self._tiles[x.shape[0]]
        if tile is None:
            return functional.linear(x, self._weight, bias)
        assert x.is_contiguous()
        return matmul(x, self._weight, bias, tile, self._space)

    def parts(self, x: torch.Tensor) -> Parts | None:
        """Return the product in the parts in which it is computed, or None if it is not split for this number of
        rows."""
        tile = self._tiles[x.shape[0]]
        if tile is None or tile.split == 1:
            return None
        assert x.is_contiguous()
        return Parts(matmul(x, self._weight, None, tile, self._space, in_parts=True))

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None, activation: Activation = "silu") -> torch.Tensor:
        """Compute the gate of the product (``ops.activation.GATES``), ``[m, n / 2]``, in the product's own kernel if
        there is one."""
        tile = self._tiles[x.shape[0]]
        if tile is None or tile.block_n == 1:
            return GATES[activation](self(x, bias))
        assert x.is_contiguous()
        return matmul(x, self._weight, bias, tile, self._space, gated=GATE_KINDS[activation])


def supported(weight: torch.Tensor) -> bool:
    """Return True if there are kernels for this weight: 16 bits, contiguous, on the compute capability on which they
    were measured."""
    return (
        weight.dtype in (torch.bfloat16, torch.float16)
        and weight.is_contiguous()
        and weight.numel() > 0
        and torch.cuda.get_device_capability(weight.device) == (9, 0)
    )
