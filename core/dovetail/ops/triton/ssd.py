"""Compute the recurrence of Mamba-2 on CUDA.

Prompts take four kernels. The first computes each chunk's state as if it began with zeros, all chunks at once; the
second passes states from chunk to chunk of each row; the third multiplies ``c`` with ``b`` of the tokens of a chunk, once
for all heads of a group; the last adds up what the tokens of a chunk and the state before it contribute to each output.
Decode rows take one kernel, which reads and writes each state once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.launch import launch, processors
from dovetail.ops.triton.sizes import cdiv, next_power_of_2

STATE_DTYPES = torch.float32, torch.bfloat16
"""The dtypes in which states of recurrences may be kept. Kernels compute with them in float32."""

if TYPE_CHECKING:
    from dovetail.interfaces.state_rows import StateRows
    from dovetail.interfaces.state_space import SSDHeads

ROWS = ["slots", "indptr", "fresh", "chunk_rows", "chunk_starts", "first_chunks", "saves"]
ADVANCED = ["slots", "starts", "counts"]
"""The arguments that kernels name in ``do_not_specialize_on_alignment`` (``ops.triton.launch``): views of a packed copy, whose
addresses depend on the numbers of rows and chunks. Without that a kernel would be compiled anew, for a second or more,
when a step first has another combination of these numbers."""


@triton.jit
def softplus(value):
    """Return ``log(1 + exp(value))``."""
    return tl.maximum(value, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(value)))


@triton.jit
def _step_size(dt, bias, low, high):
    return tl.minimum(tl.maximum(softplus(dt.to(tl.float32) + bias), low), high)


@triton.jit
def chunk_bounds(chunk, indptr, chunk_rows, chunk_starts, CHUNK: tl.constexpr):
    """Return the row of a chunk, and its first token and the one after its last, in 64 bits."""
    row = tl.load(chunk_rows + chunk)
    start = tl.load(chunk_starts + chunk).to(tl.int64)
    return row, start, tl.minimum(start + CHUNK, tl.load(indptr + row + 1).to(tl.int64))


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=ROWS)
def _chunk_states(
    x, dt, b, a, dt_bias, low, high, states, sizes, totals, indptr, chunk_rows, chunk_starts,
    tokens, heads, share, dim, width, x_stride, dt_stride, b_stride,
    CHUNK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Write the state of a chunk that begins with zeros, and for each of its tokens the step size and the sum of
    ``step size * a`` from the chunk's first token to it."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    _, start, end = chunk_bounds(chunk, indptr, chunk_rows, chunk_starts, CHUNK)
    rate, bias = tl.load(a + head), tl.load(dt_bias + head)
    state = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    before = 0.0
    for first in range(start, end, BLOCK_T):
        at = first + tl.arange(0, BLOCK_T)
        inside = at < end
        size = tl.where(inside, _step_size(tl.load(dt + at * dt_stride + head, inside, 0.0), bias, low, high), 0.0)
        total = tl.cumsum(size * rate, 0)
        whole = tl.sum(size * rate, 0)
        if tl.program_id(2) == 0:
            tl.store(sizes + head.to(tl.int64) * tokens + at, size, inside)
            tl.store(totals + head.to(tl.int64) * tokens + at, before + total, inside)
        values = tl.load(
            x + at[:, None] * x_stride + head * dim + p[None, :], inside[:, None] & (p < dim)[None, :], 0.0
        )
        keys = tl.load(
            b + at[:, None] * b_stride + (head // share) * width + n[None, :],
            inside[:, None] & (n < width)[None, :],
            0.0,
        )
        weighted = (values.to(tl.float32) * (size * tl.exp(whole - total))[:, None]).to(keys.dtype)
        state = state * tl.exp(whole) + tl.dot(tl.trans(weighted), keys, input_precision="ieee")
        before += whole
    own = (chunk.to(tl.int64) * heads + head) * dim * width
    tl.store(states + own + p[:, None] * width + n[None, :], state, (p < dim)[:, None] & (n < width)[None, :])


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=ROWS)
def _pass_states(
    state, states, entering, totals, slots, indptr, fresh, chunk_starts, first_chunks, saves, tokens, heads, numbers,
    state_stride, CHUNK: tl.constexpr, BLOCK: tl.constexpr, WRITES: tl.constexpr, SAVES: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Write for each chunk of a row the state with which it begins, to the row's slot the last state, and to the slots
    ``saves`` those after chunks."""
    row, head = tl.program_id(0), tl.program_id(1)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + row).to(tl.int64)
    end = tl.load(indptr + row + 1).to(tl.int64)
    first, stop = tl.load(first_chunks + row).to(tl.int64), tl.load(first_chunks + row + 1).to(tl.int64)
    kept = state + slot * state_stride + head * numbers + at
    stored = tl.where(slot != 0, numbers, 0)
    value = tl.load(kept, at < tl.where(tl.load(fresh + row) == 0, stored, 0), 0.0).to(tl.float32)
    for chunk in range(first, stop):
        own = (chunk * heads + head) * numbers + at
        added = tl.load(states + own, inside, 0.0)
        tl.store(entering + own, value.to(entering.dtype.element_ty), inside)
        last = tl.minimum(tl.load(chunk_starts + chunk).to(tl.int64) + CHUNK, end) - 1
        value = value * tl.exp(tl.load(totals + head.to(tl.int64) * tokens + last)) + added
        if SAVES:
            target = tl.load(saves + chunk).to(tl.int64)
            place = state + target * state_stride + head * numbers + at
            tl.store(place, value, at < tl.where(target != 0, numbers, 0))
    if WRITES:
        tl.store(kept, value, at < tl.where(first < stop, stored, 0))


@triton.jit(do_not_specialize_on_alignment=ROWS)
def _scores(
    b, c, scores, indptr, chunk_rows, chunk_starts, groups, width, b_stride, c_stride,
    CHUNK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Write ``c @ b`` of pairs of a chunk's tokens, ``[chunks, groups, CHUNK, CHUNK]``, except tiles above the diagonal."""
    chunk, group = tl.program_id(0), tl.program_id(1)
    left = tl.program_id(2) // (CHUNK // BLOCK_T) * BLOCK_T
    right = tl.program_id(2) % (CHUNK // BLOCK_T) * BLOCK_T
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    _, start, end = chunk_bounds(chunk, indptr, chunk_rows, chunk_starts, CHUNK)
    if (right > left) | (start + left >= end):
        return
    n = tl.arange(0, BLOCK_N)
    t, u = left + tl.arange(0, BLOCK_T), right + tl.arange(0, BLOCK_T)
    queries = tl.load(
        c + (start + t)[:, None] * c_stride + group * width + n[None, :],
        (start + t < end)[:, None] & (n < width)[None, :], 0.0,
    )  # fmt: skip
    keys = tl.load(
        b + (start + u)[:, None] * b_stride + group * width + n[None, :],
        (start + u < end)[:, None] & (n < width)[None, :], 0.0,
    )  # fmt: skip
    product = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    own = scores + (chunk.to(tl.int64) * groups + group) * CHUNK * CHUNK
    tl.store(own + t[:, None] * CHUNK + u[None, :], product.to(scores.dtype.element_ty))


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=ROWS)
def _outputs(
    x, c, d, out, entering, scores, sizes, totals, indptr, chunk_rows, chunk_starts,
    tokens, heads, share, dim, width, x_stride, c_stride,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    tiles: tl.constexpr = CHUNK // BLOCK_M
    chunk, head = tl.program_id(0) // tiles, tl.program_id(1)
    tile = tl.program_id(0) % tiles * BLOCK_M
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    _, start, end = chunk_bounds(chunk, indptr, chunk_rows, chunk_starts, CHUNK)
    if start + tile >= end:
        return
    t = tile + tl.arange(0, BLOCK_M)
    at = start + t
    inside = at < end
    sizes += head.to(tl.int64) * tokens
    totals += head.to(tl.int64) * tokens
    total = tl.load(totals + at, inside, 0.0)
    queries = tl.load(
        c + at[:, None] * c_stride + (head // share) * width + n[None, :], inside[:, None] & (n < width)[None, :], 0.0
    )
    state = tl.load(
        entering + ((chunk.to(tl.int64) * heads + head) * dim + p[:, None]) * width + n[None, :],
        (p < dim)[:, None] & (n < width)[None, :], 0.0,
    )  # fmt: skip
    result = tl.dot(queries, tl.trans(state), input_precision="ieee") * tl.exp(total)[:, None]
    scores += (chunk.to(tl.int64) * (heads // share) + head // share) * CHUNK * CHUNK
    for first in range(0, tl.minimum(tile + BLOCK_M, (end - start).to(tl.int32)), BLOCK_T):
        u = first + tl.arange(0, BLOCK_T)
        real = start + u < end
        seen = (u[None, :] <= t[:, None]) & inside[:, None] & real[None, :]
        product = tl.load(scores + t[:, None] * CHUNK + u[None, :], seen, 0.0).to(tl.float32)
        passed = total[:, None] - tl.load(totals + start + u, real, 0.0)[None, :]
        weight = (
            product * tl.exp(tl.where(seen, passed, float("-inf"))) * tl.load(sizes + start + u, real, 0.0)[None, :]
        )
        values = tl.load(
            x + (start + u)[:, None] * x_stride + head * dim + p[None, :], real[:, None] & (p < dim)[None, :], 0.0
        )
        result = tl.dot(weight.to(values.dtype), values, result, input_precision="ieee")
    mask = inside[:, None] & (p < dim)[None, :]
    own = tl.load(x + at[:, None] * x_stride + head * dim + p[None, :], mask, 0.0).to(tl.float32)
    result += own * tl.load(d + head)
    tl.store(out + (at[:, None] * heads + head) * dim + p[None, :], result.to(out.dtype.element_ty), mask)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _step(
    x, dt, b, c, a, d, dt_bias, low, high, state, out, slots,
    heads, share, dim, width, x_stride, dt_stride, b_stride, c_stride, state_stride,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + row).to(tl.int64)
    kept = state + slot * state_stride + (head * dim + p[:, None]) * width + n[None, :]
    mask = (p < tl.where(slot != 0, dim, 0))[:, None] & (n < width)[None, :]
    value = tl.load(kept, mask, 0.0).to(tl.float32)
    size = _step_size(tl.load(dt + row * dt_stride + head), tl.load(dt_bias + head), low, high)
    group = (head // share) * width
    key = tl.load(b + row * b_stride + group + n, n < width, 0.0).to(tl.float32)
    query = tl.load(c + row * c_stride + group + n, n < width, 0.0).to(tl.float32)
    own = tl.load(x + row * x_stride + head * dim + p, p < dim, 0.0).to(tl.float32)
    value = value * tl.exp(size * tl.load(a + head)) + (own * size)[:, None] * key[None, :]
    tl.store(kept, value, mask)
    result = tl.sum(value * query[None, :], 1) + own * tl.load(d + head)
    tl.store(out + (row * heads + head) * dim + p, result.to(out.dtype.element_ty), p < dim)


@triton.jit(do_not_specialize_on_alignment=ADVANCED)
def _advance(
    x, dt, b, a, dt_bias, low, high, state, slots, starts, counts,
    heads, share, dim, width, x_stride, dt_stride, b_stride, state_stride,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + row).to(tl.int64)
    count = tl.load(counts + row)
    if (slot != 0) & (count > 0):
        first = tl.load(starts + row).to(tl.int64)
        kept = state + slot * state_stride + (head * dim + p[:, None]) * width + n[None, :]
        mask = (p < dim)[:, None] & (n < width)[None, :]
        value = tl.load(kept, mask, 0.0).to(tl.float32)
        rate, bias = tl.load(a + head), tl.load(dt_bias + head)
        for index in range(count):
            token = first + index
            size = _step_size(tl.load(dt + token * dt_stride + head), bias, low, high)
            key = tl.load(b + token * b_stride + (head // share) * width + n, n < width, 0.0).to(tl.float32)
            own = tl.load(x + token * x_stride + head * dim + p, p < dim, 0.0).to(tl.float32)
            value = value * tl.exp(size * rate) + (own * size)[:, None] * key[None, :]
        tl.store(kept, value, mask)


def saved_slots(rows: StateRows) -> torch.Tensor:
    """Return ``rows.saves`` for a kernel, which does not read it if it is None."""
    return rows.slots if rows.saves is None else rows.saves


def ssd(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    heads: SSDHeads,
    state: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    """Compute ``ops.ssd.ssd``. ``rows.chunk`` is a power of 2 of 16 or more."""
    _check(x, dt, b, c, state)
    (tokens, count, dim), (groups, width), chunk = x.shape, b.shape[1:], rows.chunk
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    chunks = len(rows.chunk_rows)
    if not chunks:
        return out
    states = torch.empty(chunks, count, dim, width, device=x.device)
    entering = torch.empty_like(states, dtype=x.dtype)
    scores = torch.empty(chunks, groups, chunk, chunk, dtype=x.dtype, device=x.device)
    sizes, totals = torch.empty(2, count, tokens, device=x.device)
    tile, block_n = min(chunk, 64), max(16, next_power_of_2(width))
    block_p = min(64, max(16, next_power_of_2(dim)))
    blocks, bounds = cdiv(dim, block_p), (rows.indptr, rows.chunk_rows, rows.chunk_starts)
    launch(
        _chunk_states, (chunks, count, blocks),
        x, dt, b, heads.a, heads.dt_bias, *heads.limits, states, sizes, totals, *bounds,
        tokens, count, count // groups, dim, width, x.stride(0), dt.stride(0), b.stride(0),
        CHUNK=chunk, BLOCK_T=tile, BLOCK_P=block_p, BLOCK_N=block_n, num_warps=4 if block_n <= 128 else 8, num_stages=2,
    )  # fmt: skip
    launch(
        _pass_states, (len(rows.lens), count, cdiv(dim * width, 1024)),
        state, states, entering, totals, rows.slots, rows.indptr, rows.fresh, rows.chunk_starts, rows.first_chunks,
        saved_slots(rows), tokens, count, dim * width, state.stride(0), CHUNK=chunk, BLOCK=1024, WRITES=rows.writes,
        SAVES=rows.saves is not None,
    )  # fmt: skip
    launch(
        _scores, (chunks, groups, (chunk // tile) ** 2),
        b, c, scores, *bounds, groups, width, b.stride(0), c.stride(0), CHUNK=chunk, BLOCK_T=tile, BLOCK_N=block_n,
    )  # fmt: skip
    high = min(chunk, 128 if block_n <= 128 else 64)
    launch(
        _outputs, (chunks * (chunk // high), count, blocks),
        x, c, heads.d, out, entering, scores, sizes, totals, *bounds,
        tokens, count, count // groups, dim, width, x.stride(0), c.stride(0),
        CHUNK=chunk, BLOCK_M=high, BLOCK_T=tile, BLOCK_P=block_p, BLOCK_N=block_n,
        num_warps=8 if high == 128 else 4, num_stages=2,
    )  # fmt: skip
    return out


def ssd_step(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    heads: SSDHeads,
    state: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Compute ``ops.ssd.ssd_step``. Few rows are divided among more programs, so that every multiprocessor gets one."""
    _check(x, dt, b, c, state)
    (tokens, count, dim), (groups, width) = x.shape, b.shape[1:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    block_n = next_power_of_2(width)
    block_p = min(next_power_of_2(dim), max(1, 8192 // block_n))
    while block_p > 4 and tokens * count * cdiv(dim, block_p) < 2 * processors(x.device):
        block_p //= 2
    launch(
        _step, (tokens, count, cdiv(dim, block_p)),
        x, dt, b, c, heads.a, heads.d, heads.dt_bias, *heads.limits, state, out, slots,
        count, count // groups, dim, width, x.stride(0), dt.stride(0), b.stride(0), c.stride(0), state.stride(0),
        BLOCK_P=block_p, BLOCK_N=block_n, num_warps=4 if block_p * block_n >= 2048 else 1,
    )  # fmt: skip
    return out


def ssd_advance(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    heads: SSDHeads,
    state: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Compute ``ops.ssd.ssd_advance``."""
    _check(x, dt, b, b, state)
    (_, count, dim), (groups, width) = x.shape, b.shape[1:]
    block_n = next_power_of_2(width)
    block_p = min(next_power_of_2(dim), max(1, 8192 // block_n))
    launch(
        _advance, (len(slots), count, cdiv(dim, block_p)),
        x, dt, b, heads.a, heads.dt_bias, *heads.limits, state, slots, starts, counts,
        count, count // groups, dim, width, x.stride(0), dt.stride(0), b.stride(0), state.stride(0),
        BLOCK_P=block_p, BLOCK_N=block_n,
    )  # fmt: skip


def _check(x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor) -> None:
    assert x.stride()[1:] == (x.shape[2], 1)
    assert b.stride()[1:] == c.stride()[1:] == (b.shape[2], 1)
    assert dt.stride(1) == 1
    assert x.shape[1] % b.shape[1] == 0
    assert state.dtype in STATE_DTYPES
    assert state[0].is_contiguous()
    assert state.shape[1:] == (*x.shape[1:], b.shape[2])
