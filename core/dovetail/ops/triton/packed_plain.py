"""Dequantize weights in packed blocks of GGUF (``ops.packed_blocks``) on CUDA, and compute layers of experts that have them for many tokens: each
weight is dequantized in each step, and multiplied by the kernels of ``experts_many``. See ``ops.expert_scratch`` for the memory it is written to."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.interfaces.expert_shapes import ExpertWeights, Routing
from dovetail.ops.expert_scratch import ExpertScratch
from dovetail.ops.packed_blocks import PACKED, PackedWeight
from dovetail.ops.triton import experts_many
from dovetail.ops.triton.expert_tiles import many_tiles
from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.packed_numbers import code_number, factors_of, spread
from dovetail.ops.triton.routing import sort_by_expert
from dovetail.ops.triton.sizes import cdiv

MEAN_PAIRS = 40
"""From this mean number of pairs of an expert on, weights are dequantized first. On an H200 with the experts of Qwen3-30B-A3B in Q4_K and Q6_K, products
of codes take 824 us for a layer with 512 tokens (32 pairs) and 1,586 with 1,024; with weights that are dequantized first, 902 and 884."""
BLOCK_N, BLOCK_K = 16, 256
"""The rows and the columns of a weight that a program dequantizes."""
MOST_ELEMENTS = 1 << 30
"""The largest number of elements of a layer's ``gate_up`` or ``down`` that are dequantized at once: 2 GiB in 16 bits, which all layers
share. Larger layers are multiplied with codes."""


@triton.jit
def _number(codes, factor, less, INDEX: tl.constexpr, BITS: tl.constexpr, MIDDLE: tl.constexpr, DTYPE: tl.constexpr):
    return ((code_number(codes, INDEX, BITS) - MIDDLE) * factor - less).to(DTYPE)


@triton.jit
def write_kernel(
    w, scale, multiplier, offset, offset_multiplier, out, n, k, words,
    BITS: tl.constexpr, STEP: tl.constexpr, ZERO: tl.constexpr, WHOLE: tl.constexpr, GROUP: tl.constexpr,
    OFFSET: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Write the weight ``[n, k]`` in the dtype of ``out``, in rows of adjacent columns."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    wide, begin = tl.minimum(row, n - 1).to(tl.int64), tl.program_id(1) * BLOCK_K
    each: tl.constexpr = 32 // BITS
    unit: tl.constexpr = STEP * each
    units: tl.constexpr = BLOCK_K // unit
    middle: tl.constexpr = ZERO + (16 if BITS == 4 else 256)
    dtype: tl.constexpr = out.dtype.element_ty
    at = tl.arange(0, BLOCK_K // each)
    inside = (begin // each + at < k // each)[None, :]
    if PDL:
        gdc_launch_dependents()
    codes = tl.load(w + wide[:, None] * words + begin // each + at[None, :], inside, 0, eviction_policy="evict_first")
    factor = factors_of(scale, multiplier, wide, words, begin, k, unit, WHOLE, GROUP, BLOCK_K, BLOCK_K)
    less = tl.zeros(factor.shape, tl.float32)
    if OFFSET:
        less = factors_of(offset, offset_multiplier, wide, words, begin, k, unit, WHOLE, GROUP, BLOCK_K, BLOCK_K)
    factor = spread(factor, BLOCK_N, units, STEP)
    less = spread(less, BLOCK_N, units, STEP)
    if PDL:
        gdc_wait()
    if BITS == 4:
        even = tl.join(
            _number(codes, factor, less, 0, BITS, middle, dtype), _number(codes, factor, less, 4, BITS, middle, dtype)
        )
        more = tl.join(
            _number(codes, factor, less, 2, BITS, middle, dtype), _number(codes, factor, less, 6, BITS, middle, dtype)
        )
        even = tl.join(even, more)
        odd = tl.join(
            _number(codes, factor, less, 1, BITS, middle, dtype), _number(codes, factor, less, 5, BITS, middle, dtype)
        )
        more = tl.join(
            _number(codes, factor, less, 3, BITS, middle, dtype), _number(codes, factor, less, 7, BITS, middle, dtype)
        )
        odd = tl.join(odd, more)
        found = tl.reshape(tl.join(even, odd), [BLOCK_N, units, STEP, 2, 2, 2])
        found = tl.permute(found, (0, 1, 3, 4, 5, 2))
    else:
        even = tl.join(
            _number(codes, factor, less, 0, BITS, middle, dtype), _number(codes, factor, less, 2, BITS, middle, dtype)
        )
        odd = tl.join(
            _number(codes, factor, less, 1, BITS, middle, dtype), _number(codes, factor, less, 3, BITS, middle, dtype)
        )
        found = tl.reshape(tl.join(even, odd), [BLOCK_N, units, STEP, 2, 2])
        found = tl.permute(found, (0, 1, 3, 4, 2))
    found = tl.reshape(found, [BLOCK_N, BLOCK_K])
    column = begin + tl.arange(0, BLOCK_K)
    present = (row < n)[:, None] & (column < k)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * k + column[None, :], found, present)


def write(weight: PackedWeight, out: torch.Tensor) -> None:
    """Write a weight to contiguous ``out [rows, columns]``, rounded to its dtype."""
    (n, k), packing = out.shape, weight.packing
    sections = [weight.section(name) for name in ("codes", "scale", "multiplier", "offset", "offset_multiplier")]
    launch(
        write_kernel, (cdiv(n, BLOCK_N), cdiv(k, BLOCK_K)),  # the first dimension of a grid is not bounded by 65,535
        *sections, out, n, k, weight.rows.stride(0) // 4,
        BITS=packing.bits, STEP=packing.step, ZERO=packing.zero, WHOLE=packing.whole, GROUP=packing.group or 0,
        OFFSET=packing.offset, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K,
    )  # fmt: skip


def pays(x: torch.Tensor, top_k: int, weights: ExpertWeights) -> bool:
    """Return True if it takes less time to dequantize the weights first than to multiply with codes, for ``x [tokens, hidden]``."""
    largest = max(weights.gate_up.shape[1] * x.shape[1], weights.down.shape[1] * weights.gate_up.shape[1] // 2)
    fits = len(weights.down) * largest <= MOST_ELEMENTS and experts_many.fits(x, weights)
    return fits and x.shape[0] * top_k >= MEAN_PAIRS * weights.whole


def pair_results(
    x: torch.Tensor, routing: Routing, weights: ExpertWeights, scratch: ExpertScratch, *, in_parts: bool
) -> torch.Tensor:
    """Compute ``ops.triton.experts.pair_results``, if ``experts_many.fits``. Weights are dequantized to ``scratch``."""
    kinds, hidden, wide = weights.blocks, x.shape[1], weights.gate_up.shape[1]
    assert kinds is not None
    numel = len(weights.down) * wide * hidden

    def plain(stored: torch.Tensor, kind: str, columns: int) -> torch.Tensor:
        out = scratch.take(numel, (*stored.shape[:2], columns), x)
        write(PackedWeight(stored.flatten(0, 1), PACKED[kind], columns), out.flatten(0, 1))
        return out

    tiles = many_tiles(hidden, wide // 2, x.element_size())
    order = sort_by_expert(routing.ids, weights.first, len(weights.down), tiles.block_m)
    inner = torch.empty(routing.ids.numel(), wide // 2, dtype=x.dtype, device=x.device)
    gate_up = plain(weights.gate_up, kinds.gate_up, hidden)
    experts_many.launch_gate_up(x, inner, routing, replace(weights, gate_up=gate_up), order, tiles.gate_up)
    down = plain(weights.down, kinds.down, wide // 2)
    return experts_many.launch_down(inner, routing, replace(weights, down=down), order, tiles.down, in_parts=in_parts)
