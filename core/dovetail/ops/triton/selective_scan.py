"""Compute the recurrence of Mamba on CUDA.

Rows of one chunk take one kernel. Longer rows take three, so that all chunks are computed at once: the first computes
each chunk's last state as if it began with zeros, the second passes states from chunk to chunk of each row, and the third
computes the outputs. Programs are small, and there are many of them: a program waits for the loads of each token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.sizes import cdiv, next_power_of_2
from dovetail.ops.triton.ssd import ADVANCED, ROWS, STATE_DTYPES, chunk_bounds, saved_slots, softplus

if TYPE_CHECKING:
    from dovetail.interfaces.state_rows import StateRows
    from dovetail.interfaces.state_space import ScanChannels

BLOCK = 32
"""The number of channels of a program."""


@triton.jit
def _advance(state, x, size, keys, rates):
    """Return the state ``[channels, state_size]`` after a token with ``x, size [channels]`` and ``keys [state_size]``."""
    return state * tl.exp(size[:, None] * rates) + (size * x)[:, None] * keys[None, :]


@triton.jit(do_not_specialize_on_alignment=ROWS)
def _chunk_ends(
    x, dt, b, a, dt_bias, states, totals, indptr, chunk_rows, chunk_starts, channels, width,
    x_stride, dt_stride, b_stride, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Write the state after a chunk that begins with zeros, and the sum of the chunk's step sizes."""
    chunk = tl.program_id(0)
    i = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    n = tl.arange(0, BLOCK_N)
    inside = i < channels
    mask = inside[:, None] & (n < width)[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    _, start, end = chunk_bounds(chunk, indptr, chunk_rows, chunk_starts, CHUNK)
    rates = tl.load(a + i[:, None] * width + n[None, :], mask, 0.0)
    bias = tl.load(dt_bias + i, inside, 0.0)
    state = tl.zeros([BLOCK_C, BLOCK_N], tl.float32)
    total = tl.zeros([BLOCK_C], tl.float32)
    for t in range(start, end):
        size = softplus(tl.load(dt + t * dt_stride + i, inside, 0.0).to(tl.float32) + bias)
        values = tl.load(x + t * x_stride + i, inside, 0.0).to(tl.float32)
        keys = tl.load(b + t * b_stride + n, n < width, 0.0).to(tl.float32)
        state = _advance(state, values, size, keys, rates)
        total += size
    own = chunk.to(tl.int64) * channels + i
    tl.store(totals + own, total, inside)
    tl.store(states + own[:, None] * width + n[None, :], state, mask)


@triton.jit(do_not_specialize_on_alignment=ROWS)
def _pass_ends(
    a, state, states, totals, slots, indptr, fresh, first_chunks, saves, channels, width, state_stride,
    BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, WRITES: tl.constexpr, SAVES: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Replace the state after each chunk by that before it, and write to the row's slot the last state, and to the slots
    ``saves`` those after chunks."""
    row = tl.program_id(0)
    i = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    n = tl.arange(0, BLOCK_N)
    inside = i < channels
    mask = inside[:, None] & (n < width)[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + row).to(tl.int64)
    first, stop = tl.load(first_chunks + row).to(tl.int64), tl.load(first_chunks + row + 1).to(tl.int64)
    rates = tl.load(a + i[:, None] * width + n[None, :], mask, 0.0)
    kept = state + slot * state_stride + i[:, None] * width + n[None, :]
    stored = tl.where(slot != 0, channels, 0)
    continued = tl.where(tl.load(fresh + row) == 0, stored, 0)
    value = tl.load(kept, (i < continued)[:, None] & (n < width)[None, :], 0.0).to(tl.float32)
    for chunk in range(first, stop):
        own = chunk * channels + i
        place = states + own[:, None] * width + n[None, :]
        added = tl.load(place, mask, 0.0)
        tl.debug_barrier()
        tl.store(place, value, mask)
        value = value * tl.exp(tl.load(totals + own, inside, 0.0)[:, None] * rates) + added
        if SAVES:
            target = tl.load(saves + chunk).to(tl.int64)
            copy = state + target * state_stride + i[:, None] * width + n[None, :]
            tl.store(copy, value, (i < tl.where(target != 0, channels, 0))[:, None] & (n < width)[None, :])
    if WRITES:
        tl.store(kept, value, (i < tl.where(first < stop, stored, 0))[:, None] & (n < width)[None, :])


@triton.jit(do_not_specialize_on_alignment=ROWS)
def _chunk_outputs(
    x, dt, b, c, a, d, dt_bias, state, states, out, slots, indptr, fresh, chunk_rows, chunk_starts, channels, width,
    x_stride, dt_stride, b_stride, c_stride, state_stride,
    WHOLE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, WRITES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Write the outputs of a chunk. With ``WHOLE``, it is the only chunk of its row, and begins and ends in the row's slot;
    otherwise it begins with its state in ``states``."""
    chunk = tl.program_id(0)
    i = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    n = tl.arange(0, BLOCK_N)
    inside = i < channels
    mask = inside[:, None] & (n < width)[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, start, end = chunk_bounds(chunk, indptr, chunk_rows, chunk_starts, CHUNK)
    rates = tl.load(a + i[:, None] * width + n[None, :], mask, 0.0)
    bias = tl.load(dt_bias + i, inside, 0.0)
    factor = tl.load(d + i, inside, 0.0)
    slot = tl.load(slots + row).to(tl.int64)
    kept = state + slot * state_stride + i[:, None] * width + n[None, :]
    stored = tl.where(slot != 0, channels, 0)
    if WHOLE:
        continued = tl.where(tl.load(fresh + row) == 0, stored, 0)
        value = tl.load(kept, (i < continued)[:, None] & (n < width)[None, :], 0.0).to(tl.float32)
    else:
        value = tl.load(states + (chunk.to(tl.int64) * channels + i[:, None]) * width + n[None, :], mask, 0.0)
    for t in range(start, end):
        size = softplus(tl.load(dt + t * dt_stride + i, inside, 0.0).to(tl.float32) + bias)
        values = tl.load(x + t * x_stride + i, inside, 0.0).to(tl.float32)
        keys = tl.load(b + t * b_stride + n, n < width, 0.0).to(tl.float32)
        queries = tl.load(c + t * c_stride + n, n < width, 0.0).to(tl.float32)
        value = _advance(value, values, size, keys, rates)
        result = tl.sum(value * queries[None, :], 1) + values * factor
        tl.store(out + t * channels + i, result.to(out.dtype.element_ty), inside)
    if WHOLE and WRITES:
        tl.store(kept, value, (i < stored)[:, None] & (n < width)[None, :])


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _step(
    x, dt, b, c, a, d, dt_bias, state, out, slots, channels, width, x_stride, dt_stride, b_stride, c_stride,
    state_stride, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    n = tl.arange(0, BLOCK_N)
    inside = i < channels
    mask = inside[:, None] & (n < width)[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + row).to(tl.int64)
    kept = state + slot * state_stride + i[:, None] * width + n[None, :]
    stored = (i < tl.where(slot != 0, channels, 0))[:, None] & (n < width)[None, :]
    value = tl.load(kept, stored, 0.0).to(tl.float32)
    rates = tl.load(a + i[:, None] * width + n[None, :], mask, 0.0)
    size = softplus(tl.load(dt + row * dt_stride + i, inside, 0.0).to(tl.float32) + tl.load(dt_bias + i, inside, 0.0))
    values = tl.load(x + row * x_stride + i, inside, 0.0).to(tl.float32)
    keys = tl.load(b + row * b_stride + n, n < width, 0.0).to(tl.float32)
    queries = tl.load(c + row * c_stride + n, n < width, 0.0).to(tl.float32)
    value = _advance(value, values, size, keys, rates)
    tl.store(kept, value, stored)
    result = tl.sum(value * queries[None, :], 1) + values * tl.load(d + i, inside, 0.0)
    tl.store(out + row * channels + i, result.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize_on_alignment=ADVANCED)
def _advance_rows(
    x, dt, b, a, dt_bias, state, slots, starts, counts, channels, width, x_stride, dt_stride, b_stride, state_stride,
    BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0)
    i = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    n = tl.arange(0, BLOCK_N)
    inside = i < channels
    mask = inside[:, None] & (n < width)[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + row).to(tl.int64)
    count = tl.load(counts + row)
    if (slot != 0) & (count > 0):
        first = tl.load(starts + row).to(tl.int64)
        kept = state + slot * state_stride + i[:, None] * width + n[None, :]
        value = tl.load(kept, mask, 0.0).to(tl.float32)
        rates = tl.load(a + i[:, None] * width + n[None, :], mask, 0.0)
        bias = tl.load(dt_bias + i, inside, 0.0)
        for index in range(count):
            t = first + index
            size = softplus(tl.load(dt + t * dt_stride + i, inside, 0.0).to(tl.float32) + bias)
            values = tl.load(x + t * x_stride + i, inside, 0.0).to(tl.float32)
            keys = tl.load(b + t * b_stride + n, n < width, 0.0).to(tl.float32)
            value = _advance(value, values, size, keys, rates)
        tl.store(kept, value, mask)


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    channels: ScanChannels,
    state: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    """Compute ``ops.selective_scan.selective_scan``."""
    _check(x, dt, b, c, channels, state)
    count, width = state.shape[1:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    chunks, blocks = len(rows.chunk_rows), cdiv(count, BLOCK)
    if not chunks:
        return out
    block_n = next_power_of_2(width)
    bounds = (rows.indptr, rows.chunk_rows, rows.chunk_starts)
    whole = chunks == int(np.count_nonzero(rows.lens))
    states = state  # not used if rows are one chunk each
    if not whole:
        states = torch.empty(chunks, count, width, device=x.device)
        totals = torch.empty(chunks, count, device=x.device)
        launch(
            _chunk_ends, (chunks, blocks),
            x, dt, b, channels.a, channels.dt_bias, states, totals, *bounds, count, width,
            x.stride(0), dt.stride(0), b.stride(0), CHUNK=rows.chunk, BLOCK_C=BLOCK, BLOCK_N=block_n, num_warps=1,
        )  # fmt: skip
        launch(
            _pass_ends, (len(rows.lens), blocks),
            channels.a, state, states, totals, rows.slots, rows.indptr, rows.fresh, rows.first_chunks, saved_slots(rows),
            count, width, state.stride(0), BLOCK_C=BLOCK, BLOCK_N=block_n, WRITES=rows.writes,
            SAVES=rows.saves is not None, num_warps=1,
        )  # fmt: skip
    launch(
        _chunk_outputs, (chunks, blocks),
        x, dt, b, c, channels.a, channels.d, channels.dt_bias, state, states, out, rows.slots, rows.indptr, rows.fresh,
        rows.chunk_rows, rows.chunk_starts, count, width, x.stride(0), dt.stride(0), b.stride(0), c.stride(0),
        state.stride(0), WHOLE=whole, CHUNK=rows.chunk, BLOCK_C=BLOCK, BLOCK_N=block_n, WRITES=rows.writes, num_warps=1,
    )  # fmt: skip
    return out


def selective_scan_step(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    channels: ScanChannels,
    state: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Compute ``ops.selective_scan.selective_scan_step``."""
    _check(x, dt, b, c, channels, state)
    count, width = state.shape[1:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        launch(
            _step, (len(x), cdiv(count, BLOCK)),
            x, dt, b, c, channels.a, channels.d, channels.dt_bias, state, out, slots, count, width,
            x.stride(0), dt.stride(0), b.stride(0), c.stride(0), state.stride(0),
            BLOCK_C=BLOCK, BLOCK_N=next_power_of_2(width), num_warps=1,
        )  # fmt: skip
    return out


def selective_scan_advance(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    channels: ScanChannels,
    state: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Compute ``ops.selective_scan.selective_scan_advance``."""
    _check(x, dt, b, b, channels, state)
    count, width = state.shape[1:]
    launch(
        _advance_rows, (len(slots), cdiv(count, BLOCK)),
        x, dt, b, channels.a, channels.dt_bias, state, slots, starts, counts, count, width,
        x.stride(0), dt.stride(0), b.stride(0), state.stride(0),
        BLOCK_C=BLOCK, BLOCK_N=next_power_of_2(width), num_warps=1,
    )  # fmt: skip


def _check(
    x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor, channels: ScanChannels, state: torch.Tensor
) -> None:
    assert x.stride(1) == dt.stride(1) == b.stride(1) == c.stride(1) == 1
    assert channels.a.is_contiguous()
    assert state.dtype in STATE_DTYPES
    assert state[0].is_contiguous()
    assert state.shape[1:] == (x.shape[1], b.shape[1]) == channels.a.shape
