"""Multiply FP8 activations with an FP8 weight whose scales belong to blocks, as DeepSeek-V3 does (arXiv 2412.19437, 3.3)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.launch import INTERPRETED, launch
from dovetail.ops.triton.sizes import cdiv


@triton.jit
def _block_product(
    x, x_scale, weight, scale, bias, y, m, n, k, scale_rows, scale_columns,
    BIAS: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    # Programs of one column of tiles follow each other, so that they read the same rows of the weight from the cache.
    tiles_m = tl.cdiv(m, BLOCK_M)
    tile_m, tile_n = tl.program_id(0) % tiles_m, tl.program_id(0) // tiles_m
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    row_inside, column_inside = rows < m, columns < n
    x_at = x + rows.to(tl.int64)[:, None] * k + inner[None, :]
    w_at = weight + columns.to(tl.int64)[None, :] * k + inner[:, None]
    scale_at = scale + (columns // scale_rows) * scale_columns
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(scale_columns):
        inside = step * BLOCK_K + inner < k
        a = tl.load(x_at + step * BLOCK_K, row_inside[:, None] & inside[None, :], 0.0)
        b = tl.load(w_at + step * BLOCK_K, column_inside[None, :] & inside[:, None], 0.0)
        if HALF:
            a, b = a.to(tl.float16), b.to(tl.float16)
        product = tl.dot(a, b)
        of_x = tl.load(x_scale + rows * scale_columns + step, row_inside, 0.0)
        of_w = tl.load(scale_at + step, column_inside, 0.0)
        total += product * of_x[:, None] * of_w[None, :]
    if BIAS:
        total += tl.load(bias + columns, column_inside, 0.0).to(tl.float32)[None, :]
    out = y + rows.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(out, total.to(y.dtype.element_ty), row_inside[:, None] & column_inside[None, :])


def block_product(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int],
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return ``x @ weight.T + bias`` in ``dtype``, ``[tokens, out]``. ``x [tokens, in]`` and ``weight [out, in]`` are FP8.
    ``x_scale [tokens, blocks of in]`` and ``scale [blocks of out, blocks of in]`` are float32; ``block`` is the number of
    rows and columns of a block of the weight. Sums are float32, scaled and added after each block of inputs. Mutates
    nothing."""
    (m, k), n = x.shape, weight.shape[0]
    y = torch.empty(m, n, dtype=dtype, device=x.device)
    if m:
        block_m = 16 if m <= 16 else 64
        block_n = 64 if m <= 64 else 128
        grid = (cdiv(m, block_m) * cdiv(n, block_n),)
        launch(
            _block_product, grid,
            x, x_scale, weight, scale, bias, y, m, n, k, block[0], scale.shape[1],
            BIAS=bias is not None, HALF=INTERPRETED, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block[1],
            num_warps=4, num_stages=4,
        )  # fmt: skip
    return y
