"""Choose greedy and random tokens on CUDA in two steps: statistics of every block of a row, then one program per row.

Random tokens are drawn by inversion. The first step computes the maximum of each block and its sum of ``exp((l - max) /
T)``. The second step finds the block in which the cumulative mass exceeds ``uniform`` times the total, and scans only
that block. The blocks depend only on the vocabulary, and sums are in a fixed order, so the token of a row depends on
nothing but the row. ``filters.py`` applies filters. NaN counts as -inf here, +inf as the largest finite number.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.bounds import SLOTS, value_bits
from dovetail.ops.triton.filters import filtered_kernel
from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.rows import BLOCK, SUB, best_token, clean, combine, exponent_scale, invert_blocks
from dovetail.ops.triton.sizes import cdiv, next_power_of_2


@triton.jit(do_not_specialize_on_alignment=["temperature"])
def _stats_kernel(
    logits,
    row_stride,
    vocab,
    temperature,  # None: 1 in every row
    temperature_stride,
    values,  # float32 [n, 2, blocks]: maximum, sum
    ids,  # int32 [n, blocks]: first group of SUB tokens that has the maximum
    peaks,  # [n, ceil(vocab / SUB)]: maximum of each SUB tokens, in the logits' dtype
    SUMS: tl.constexpr,
    PEAKS: tl.constexpr,
    BLOCK: tl.constexpr,
    SUB: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    group = tl.arange(0, BLOCK // SUB)
    token = block * BLOCK + group[:, None] * SUB + tl.arange(0, SUB)[None, :]
    x = clean(tl.load(logits + row * row_stride + token, mask=token < vocab, other=float("-inf")))
    peak = tl.max(x, axis=1)
    best = tl.max(peak, axis=0)
    first = tl.min(tl.where(peak == best, group, BLOCK // SUB), axis=0)
    tl.store(values + row * 2 * blocks + block, best)
    tl.store(ids + row * blocks + block, block * (BLOCK // SUB) + first)
    if SUMS:
        row_temperature = 1.0 if temperature is None else tl.load(temperature + row * temperature_stride)
        scale = exponent_scale(row_temperature)
        base = tl.where(best == float("-inf"), 0.0, best)
        total = tl.sum(tl.sum(tl.exp2((x - base) * scale), axis=1), axis=0)
        tl.store(values + (row * 2 + 1) * blocks + block, total)
    if PEAKS:
        count = (vocab + SUB - 1) // SUB
        at = block * (BLOCK // SUB) + group
        tl.store(peaks + row * count + at, peak.to(peaks.dtype.element_ty), mask=at < count)


@triton.jit
def _greedy_kernel(
    logits,
    row_stride,
    vocab,
    values,
    ids,
    out,
    blocks,
    BLOCKS: tl.constexpr,
    SUB: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    maxima = tl.load(values + n * 2 * blocks + block, mask=block < blocks, other=float("-inf"))
    groups = tl.load(ids + n * blocks + block, mask=block < blocks, other=2**20)
    tl.store(out + n, best_token(logits + n * row_stride, vocab, maxima, groups, SUB).to(tl.int64))


@triton.jit(do_not_specialize_on_alignment=["temperature", "uniform", "out"])
def _sample_kernel(
    logits,
    row_stride,
    vocab,
    temperature,
    temperature_stride,
    uniform,
    values,
    ids,
    out,
    blocks,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    SUB: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.program_id(0).to(tl.int64)
    row = logits + n * row_stride
    heat = tl.load(temperature + n * temperature_stride)
    scale = exponent_scale(heat)
    best, token, mass, maxima = combine(row, n, vocab, values, ids, blocks, scale, BLOCKS, SUB)
    if heat != 0:
        number = tl.load(uniform + n)
        token = invert_blocks(row, vocab, number, scale, best, token, mass, maxima, BLOCKS, BLOCK)
    tl.store(out + n, token.to(tl.int64))


def statistics(
    logits: torch.Tensor, temperature: torch.Tensor | None, with_sums: bool, with_peaks: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``values``, ``ids`` and ``peaks`` of ``logits [n, V]`` as ``_stats_kernel`` describes them, sums and peaks
    only if they are requested. Without ``temperature``, that of every row is 1."""
    n, vocab = logits.shape
    blocks = cdiv(vocab, BLOCK)
    values = torch.empty((n, 2, blocks), dtype=torch.float32, device=logits.device)
    ids = torch.empty((n, blocks), dtype=torch.int32, device=logits.device)
    peaks = logits.new_empty((n, cdiv(vocab, SUB))) if with_peaks else logits
    launch(
        _stats_kernel,
        (blocks, n),
        logits,
        logits.stride(0),
        vocab,
        temperature,
        0 if temperature is None else temperature.stride(0),
        values,
        ids,
        peaks,
        SUMS=with_sums,
        PEAKS=with_peaks,
        BLOCK=BLOCK,
        SUB=SUB,
        num_warps=4,
    )
    return values, ids, peaks


def _result(logits: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    assert logits.stride(1) == 1, "a row of logits must be contiguous"
    return torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device) if out is None else out


def greedy(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the most likely token of each row of ``logits [n, V]`` of any float dtype, int64 ``[n]``; of equal ones,
    the first.

    Writes ``out`` if given. Does not wait for the device and does not depend on values on the host.
    """
    out = _result(logits, out)
    if len(logits):
        values, ids, _ = statistics(logits, None, with_sums=False, with_peaks=False)
        blocks = ids.shape[1]
        launch(
            _greedy_kernel,
            (len(logits),),
            logits,
            logits.stride(0),
            logits.shape[1],
            values,
            ids,
            out,
            blocks,
            BLOCKS=next_power_of_2(blocks),
            SUB=SUB,
            num_warps=1,
        )
    return out


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    uniform: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return tokens int64 ``[n]`` sampled from ``logits [n, V]`` of any float dtype, with the settings of
    ``dovetail.ops.sampling.Filters``.

    Rows of temperature 0 are greedy. Writes ``out`` if given. Every tensor is read on the device when the kernels run.
    """
    out = _result(logits, out)
    n, vocab = logits.shape
    if n == 0:
        return out
    filters = (top_k, top_p, min_p)
    filtered = any(column is not None for column in filters)
    values, ids, peaks = statistics(logits, temperature, with_sums=True, with_peaks=filtered)
    blocks = ids.shape[1]
    row = (logits, logits.stride(0), vocab, temperature, temperature.stride(0))
    sizes = {"BLOCKS": next_power_of_2(blocks), "BLOCK": BLOCK, "SUB": SUB}
    if filtered:
        found = (uniform.contiguous(), values, ids, peaks)
        _launch_filtered(row, filters, found, out, blocks, sizes)
    else:
        launch(_sample_kernel, (n,), *row, uniform.contiguous(), values, ids, out, blocks, **sizes, num_warps=8)
    return out


def _launch_filtered(
    row: tuple[Any, ...],
    filters: tuple[torch.Tensor | None, ...],
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    blocks: int,
    sizes: dict[str, int],
) -> None:
    logits, peaks = row[0], found[-1]
    columns = [c for tensor in filters for c in ((tensor, 0) if tensor is None else (tensor, tensor.stride(0)))]
    groups = torch.empty((len(logits), SLOTS), dtype=torch.int32, device=logits.device)
    bits = {"SLOTS": SLOTS, "PEAKS": next_power_of_2(peaks.shape[1]), "SHIFT": value_bits(logits.dtype)}
    launch(filtered_kernel, (len(logits),), *row, *columns, *found, groups, out, blocks, **sizes, **bits, num_warps=16)
