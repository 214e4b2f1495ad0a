"""Compute layers of experts with MXFP4 weights for many tokens on CUDA: dequantize each weight in each step, and multiply it by the
kernels of ``experts_many``.

The dequantized weight is written to memory that all layers of one size of a model share (``ops.expert_scratch``). The largest step, which is
run when memory is planned, allocates it, so that it is counted.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.interfaces.expert_shapes import ExpertWeights, Routing
from dovetail.ops.expert_scratch import ExpertScratch
from dovetail.ops.triton import experts_many, mxfp4_words
from dovetail.ops.triton.expert_tiles import many_tiles
from dovetail.ops.triton.launch import INTERPRETED, launch
from dovetail.ops.triton.mxfp4_numbers import HALF, dequantized_codes, scale_factors, unscaled
from dovetail.ops.triton.routing import sort_by_expert
from dovetail.ops.triton.sizes import cdiv

MEAN_PAIRS, MEAN_PAIRS_OF_WORDS = 128, 384
"""From this mean number of pairs of an expert on, weights are dequantized first: from the second number on if ``mxfp4_words`` can compute the layer. On
an H200 with gpt-oss-20b and 2,048 tokens (256 pairs), products of words take 1,250 us for a layer (1,289 with skewed routing), and 2,423 (2,483) with 4,096
tokens; those of weights that are dequantized first 1,494 (1,651) and 2,146 (2,298)."""
_ROWS, _HALF_K = 32, 128
"""A program dequantizes this number of rows, and this number of bytes of each. Rows are not masked: each weight has as many rows as the
other one has columns, or twice as many, and columns are multiples of 32, because 32 columns have one scale."""


@triton.jit
def _dequantize(
    codes, scales, out, rows, half,
    BLOCK_N: tl.constexpr, HALF_K: tl.constexpr, ASSEMBLY: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    expert = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(0) * HALF_K
    at, group = start + tl.arange(0, HALF_K), start // HALF + tl.arange(0, HALF_K // HALF)
    inside = (at < half)[None, :]
    if PDL:
        gdc_launch_dependents()
    place = expert * rows + row[:, None]
    own = tl.load(codes + place * half + at[None, :], inside, 0)
    own_scales = tl.load(
        scales + (expert * (half // HALF) + group[:, None]) * rows + row[None, :],
        (group < half // HALF)[:, None], 0,
    )  # fmt: skip
    if PDL:
        gdc_wait()
    dtype: tl.constexpr = out.dtype.element_ty
    factors = scale_factors(own_scales, dtype, BLOCK_N, HALF_K, ASSEMBLY)
    low = unscaled(dequantized_codes(own, factors, False, dtype, ASSEMBLY).to(tl.float32), dtype).to(dtype)
    high = unscaled(dequantized_codes(own, factors, True, dtype, ASSEMBLY).to(tl.float32), dtype).to(dtype)
    target = out + place * (2 * half) + (at + at // HALF * HALF)[None, :]
    tl.store(target, low, inside)
    tl.store(target + HALF, high, inside)


def dequantize(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write the weights of ``codes`` and ``scales`` (see ``ExpertWeights``) to ``out [experts, out, in]``, which has a dtype of 16 bits, and
    return it. They are exact."""
    experts, rows, half = codes.shape
    launch(
        _dequantize, (cdiv(half, _HALF_K), cdiv(rows, _ROWS), experts),
        codes, scales, out, rows, half, BLOCK_N=_ROWS, HALF_K=_HALF_K, ASSEMBLY=not INTERPRETED,
    )  # fmt: skip
    return out


def pays(x: torch.Tensor, top_k: int, weights: ExpertWeights) -> bool:
    """Return True if it takes less time to dequantize the weights first than to multiply with codes, for ``x [tokens, hidden]``."""
    least = MEAN_PAIRS_OF_WORDS if mxfp4_words.fits(x, weights) else MEAN_PAIRS
    return x.shape[0] * top_k >= least * weights.whole and experts_many.fits(x, weights)


def pair_results(
    x: torch.Tensor, routing: Routing, weights: ExpertWeights, scratch: ExpertScratch, *, in_parts: bool
) -> torch.Tensor:
    """Compute ``ops.triton.experts.pair_results``, if ``experts_many.fits``. Weights are dequantized to ``scratch``."""
    pairs, (count, rows, _), hidden = routing.ids.numel(), weights.gate_up.shape, x.shape[1]
    size, numel = rows // 2, count * rows * hidden
    assert weights.gate_up_scale is not None
    assert weights.down_scale is not None
    tiles = many_tiles(hidden, size, x.element_size())
    order = sort_by_expert(routing.ids, weights.first, len(weights.down), tiles.block_m)
    inner = torch.empty(pairs, size, dtype=x.dtype, device=x.device)
    gate_up = dequantize(weights.gate_up, weights.gate_up_scale, scratch.take(numel, (count, rows, hidden), x))
    experts_many.launch_gate_up(x, inner, routing, replace(weights, gate_up=gate_up), order, tiles.gate_up)
    down = dequantize(weights.down, weights.down_scale, scratch.take(numel, (count, hidden, size), x))
    return experts_many.launch_down(inner, routing, replace(weights, down=down), order, tiles.down, in_parts=in_parts)
