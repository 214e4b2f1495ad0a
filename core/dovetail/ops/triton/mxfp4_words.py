"""Compute layers of experts with MXFP4 weights for some tens of tokens, where experts have up to 64 pairs each and most of the
time goes into dequantizing.

Blocks have up to ``BLOCK_M`` pairs, so that the weight of an expert is dequantized once; a program multiplies with as many columns as
its block needs. Codes are read as words of 16 bits, whose four planes are the operand that warp groups take from registers: no byte
changes its register. The columns of ``x`` are put into the order of the planes before (``sorted_and_ordered``), and gate and up write their
results in that order.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.interfaces.expert_shapes import ExpertWeights, Routing
from dovetail.ops.triton.expert_pairs import activate, pairs_of_block, scaled_and_biased, store_down
from dovetail.ops.triton.launch import INTERPRETED, launch
from dovetail.ops.triton.mxfp4_numbers import plane_of_words, unscaled, word_factors
from dovetail.ops.triton.routing import (
    ONE_KERNEL,
    OWN,
    ExpertOrder,
    empty_order,
    sort_by_expert,
    sort_pairs,
    sort_pairs_constants,
)
from dovetail.ops.triton.sizes import cdiv

_PLAIN = tl.constexpr(INTERPRETED)  # the interpreter has no assembly
WORDS = tl.constexpr(32)
"""The words of a row that are read at once: 128 columns, or four blocks of columns with one scale."""
CHUNK = tl.constexpr(128)
GROUP = tl.constexpr(8)
"""The words that have one scale."""
BLOCK_M = tl.constexpr(64)
"""The most pairs of a block."""
MEAN_PAIRS = 6
"""The kernels are used from this mean number of pairs of an expert on. On an H200 with gpt-oss-20b and 48 tokens (6 pairs), a layer takes 114 us with the
routing of dummy weights, 154 with skewed and 183 with exactly uniform routing, and with the kernels of ``mxfp4`` 145, 166 and 151."""


@triton.jit
def _place(column, width):
    """Return where a column of ``x`` is in the order of words. The last chunk has the last 128 columns, also those that the chunk
    before it has."""
    chunk = column // CHUNK
    last = tl.cdiv(width, CHUNK) - 1
    at = tl.where(chunk == last, column - (width - CHUNK), column % CHUNK)
    return chunk * CHUNK + (at % 2 * 2 + at // 16 % 2) * WORDS + at // 32 * GROUP + at % 16 // 2


@triton.jit(do_not_specialize=["pairs", "first", "sorters"])
def _sort_and_order(
    ids, order, blocks, used, x, out, pairs, first, experts, width, sorters,
    SIZE: tl.constexpr, OWN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Compute ``sort_pairs`` in the first ``sorters`` programs. The others write BLOCK columns of a row of ``x`` in the order of words."""
    if tl.program_id(0) < sorters:
        sort_pairs(ids, order, blocks, used, pairs, first, experts, SIZE, OWN, BLOCK_M, BLOCK_E, PDL)
    else:
        program = tl.program_id(0) - sorters
        parts = tl.cdiv(width, BLOCK)
        row = (program // parts).to(tl.int64)
        column = program % parts * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        if PDL:
            gdc_launch_dependents()
            gdc_wait()
        value = tl.load(x + row * width + column, inside)
        tl.store(out + row * (tl.cdiv(width, CHUNK) * CHUNK) + _place(column, width), value, inside)


def _in_chunks(rows: int, width: int, like: torch.Tensor) -> torch.Tensor:
    """Allocate rows of ``width`` columns in the order of words."""
    return torch.empty(rows, cdiv(width, CHUNK.value) * CHUNK.value, dtype=like.dtype, device=like.device)


def sorted_and_ordered(
    x: torch.Tensor, ids: torch.Tensor, first: int, experts: int, block_m: int
) -> tuple[ExpertOrder, torch.Tensor]:
    """Return ``sort_by_expert``, and ``x [rows, width]`` with its columns in the order of words, undefined where the last chunk repeats
    columns. One kernel does both, if there are at most ``ONE_KERNEL`` pairs."""
    assert ids.is_contiguous()
    (rows, width), pairs = x.shape, ids.numel()
    apart = pairs > ONE_KERNEL
    order = sort_by_expert(ids, first, experts, block_m) if apart else empty_order(ids, experts, block_m)
    out, sorters = _in_chunks(rows, width, x), 0 if apart else 1 + cdiv(pairs, OWN)
    launch(
        _sort_and_order, (sorters + rows * cdiv(width, 1024),),
        ids, *order[:3], x, out, pairs, first, experts, width, sorters,
        **sort_pairs_constants(min(pairs, ONE_KERNEL), experts, block_m), BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return order, out


@triton.jit
def _joined(p0, p1, p2, p3):
    """Return planes ``[rows, WORDS]`` one after the other, ``[rows, 4 * WORDS]``."""
    planes = tl.join(tl.join(p0, p2), tl.join(p1, p3))
    return tl.reshape(tl.permute(planes, (0, 2, 3, 1)), [p0.shape[0], 4 * WORDS])


@triton.jit
def _ended(total):
    """Return ``total`` when the products of warp groups that make it have ended: Triton 3.6 lets those that take an operand from registers
    run on into the next round of a loop, which overwrites these registers."""
    if _PLAIN:
        return total
    else:
        return tl.inline_asm_elementwise("", "=r,0", [total], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _multiply_block(
    x, w, scale, bias, out, weights, order, blocks, block, tile, tokens, k, width, alpha, limit, offset,
    GATED: tl.constexpr, TOP_K: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, LIMITED: tl.constexpr, IN_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
) -> None:  # fmt: skip
    expert, row, pair, present = pairs_of_block(order, blocks, block, BLOCK_M)
    columns: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    # the last tile repeats columns of the one before it, so that no row of the weight is masked
    first = tl.multiple_of(tl.minimum(tile * columns, width - columns), 32)
    wide = 2 * width if GATED else width
    local = tl.arange(0, BLOCK_N)
    held = first + local % columns + local // columns * width
    chunks = tl.cdiv(k, CHUNK)
    source = pair // TOP_K if GATED else tl.where(present, row, 0)
    at = tl.arange(0, CHUNK)
    rows = x + source.to(tl.int64)[None, :] * (chunks * CHUNK) + at[:, None]
    words = tl.multiple_of(k // 4, GROUP)
    stored = w + expert * wide * words + held[:, None] * words + tl.arange(0, WORDS)[None, :]
    scales = scale + expert * wide * (words // GROUP) + tl.arange(0, WORDS // GROUP)[:, None] * wide + held[None, :]
    dtype: tl.constexpr = x.dtype.element_ty
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for chunk in tl.range(0, chunks, num_stages=STAGES):
        start = tl.multiple_of(tl.minimum(chunk * WORDS, words - WORDS), GROUP)
        codes = tl.load(stored + start, eviction_policy="evict_first")
        own = tl.load(scales + start // GROUP * wide)
        right = tl.load(rows + chunk * CHUNK, (at % WORDS >= chunk * WORDS - start)[:, None], 0.0)
        factors = word_factors(own, dtype, BLOCK_N, WORDS, GROUP, not _PLAIN)
        p0 = plane_of_words(codes, factors, 0, dtype, not _PLAIN)
        p1 = plane_of_words(codes, factors, 1, dtype, not _PLAIN)
        p2 = plane_of_words(codes, factors, 2, dtype, not _PLAIN)
        p3 = plane_of_words(codes, factors, 3, dtype, not _PLAIN)
        total = _ended(tl.dot(_joined(p0, p1, p2, p3), right, total))
    total = unscaled(total, dtype)
    column = first + tl.arange(0, columns)
    inside = column < width
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(total, [2, columns, BLOCK_M]), (2, 1, 0)))
        gate, up = scaled_and_biased(
            gate, up, weights, bias, expert, pair, column, present, inside, width, SCALED, BIAS
        )
        result = activate(gate, up, alpha, limit, offset, LIMITED).to(out.dtype.element_ty)
        target = row.to(tl.int64)[:, None] * (tl.cdiv(width, CHUNK) * CHUNK) + _place(column, width)[None, :]
        tl.store(out + target, result, present[:, None] & inside[None, :])
    else:
        store_down(
            out, tl.trans(total), bias, expert, weights, present, pair, column, inside, tokens, width,
            TOP_K, SCALED, BIAS, IN_PARTS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tiles", "tokens"])
def _product(
    x, w, scale, bias, out, weights, order, blocks, used, tiles, tokens, k, width, alpha, limit, offset,
    GATED: tl.constexpr, TOP_K: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, LIMITED: tl.constexpr, IN_PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    tile, block = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if block >= tl.load(used):
        return
    count = tl.load(blocks + block * 3 + 2) - tl.load(blocks + block * 3 + 1)
    # what rows of fewer pairs leave of the shared memory holds more chunks of the weight
    if count <= 16:
        _multiply_block(
            x, w, scale, bias, out, weights, order, blocks, block, tile, tokens, k, width, alpha, limit, offset,
            GATED, TOP_K, SCALED, BIAS, LIMITED, IN_PARTS, 16, BLOCK_N, STAGES + 2,
        )  # fmt: skip
    elif count <= 32:
        _multiply_block(
            x, w, scale, bias, out, weights, order, blocks, block, tile, tokens, k, width, alpha, limit, offset,
            GATED, TOP_K, SCALED, BIAS, LIMITED, IN_PARTS, 32, BLOCK_N, STAGES + 1,
        )  # fmt: skip
    else:
        _multiply_block(
            x, w, scale, bias, out, weights, order, blocks, block, tile, tokens, k, width, alpha, limit, offset,
            GATED, TOP_K, SCALED, BIAS, LIMITED, IN_PARTS, BLOCK_M, BLOCK_N, STAGES,
        )  # fmt: skip


class WordTile(NamedTuple):
    """Describe a tile of ``block_n`` rows of the weight, for the activation half of them of gate and half of up. ``registers`` is the
    most that a thread may have."""

    block_n: int
    warps: int
    stages: int
    registers: int | None


GATE_UP, DOWN = WordTile(128, 4, 3, 168), WordTile(128, 4, 3, None)
"""The fastest of 15 pairs of tiles for 64 tokens of gpt-oss-20b on an H200. Two or three programs share a multiprocessor."""


def fits(x: torch.Tensor, weights: ExpertWeights) -> bool:
    """Return True if the kernels here can compute a layer: on Hopper, where they were measured, in 16 bits."""
    sizes = x.shape[1], 2 * weights.down.shape[2]
    return x.element_size() == 2 and all(n % 32 == 0 and n >= CHUNK.value for n in sizes) and _capable(x.device)


@functools.cache
def _capable(device: torch.device) -> bool:
    """Return True for devices of compute capability 9.0, and for the CPU, on which kernels are interpreted."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


def pays(x: torch.Tensor, top_k: int, weights: ExpertWeights) -> bool:
    """Return True if the kernels here are faster than those of ``mxfp4`` for ``x [tokens, hidden]``."""
    return x.shape[0] * top_k >= MEAN_PAIRS * weights.whole and fits(x, weights)


def pair_results(x: torch.Tensor, routing: Routing, weights: ExpertWeights, *, in_parts: bool) -> torch.Tensor:
    """Compute ``ops.triton.experts.pair_results``, if ``fits``."""
    (tokens, hidden), top_k = x.shape, routing.ids.shape[1]
    count, _, half = weights.down.shape
    size, activation = 2 * half, weights.activation
    order, given = sorted_and_ordered(x, routing.ids, weights.first, count, BLOCK_M.value)
    inner = _in_chunks(tokens * top_k, size, x)
    shape = (top_k, tokens, hidden) if in_parts else (tokens, top_k, hidden)
    results = torch.empty(shape, dtype=torch.float32 if in_parts else x.dtype, device=x.device)
    for gated, source, w, scale, bias, out, tile, k, width in (
        (True, given, weights.gate_up, weights.gate_up_scale, weights.gate_up_bias, inner, GATE_UP, hidden, size),
        (False, inner, weights.down, weights.down_scale, weights.down_bias, results, DOWN, size, hidden),
    ):
        programs = cdiv(width, tile.block_n // 2 if gated else tile.block_n)
        launch(
            _product, (len(order.blocks) * programs,),
            source, w.view(torch.int16), scale, bias, out, routing.weights, *order[:3], programs, tokens, k, width,
            activation.alpha, activation.limit or 0.0, activation.offset,
            GATED=gated, TOP_K=top_k, SCALED=weights.scaled_input, BIAS=bias is not None, LIMITED=activation.limit is not None,
            IN_PARTS=in_parts, BLOCK_N=tile.block_n, STAGES=tile.stages,
            num_warps=tile.warps, num_stages=tile.stages, registers=tile.registers,
        )  # fmt: skip
    return results
