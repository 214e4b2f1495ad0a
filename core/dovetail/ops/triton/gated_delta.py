"""Compute the gated delta rule.

Prompts take three kernels. The first solves the triangular system of every chunk and head, whose right sides are the
values and what the keys read of the state before the chunk. The second passes through the chunks of a row, a block of
value channels in each program, with the state in registers. The third computes the outputs of every chunk. Decode rows
take one kernel, which reads and writes each state once.

Programs hold whole keys. ``T`` in the names of variables is the inverse of the system's matrix, ``total`` the logarithm
of the decay since the beginning of the chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.launch import launch

if TYPE_CHECKING:
    from dovetail.interfaces.mixer_shapes import DeltaGates, DeltaShape
    from dovetail.interfaces.state_rows import StateRows

_SUB = 16


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _inverse_length(x):
    """Return what normalises the rows of ``x``, a column."""
    return tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) + 1e-6)


@triton.jit
def _inverse(a, CHUNK: tl.constexpr, SUB: tl.constexpr):
    """Return the inverse of ``I + a``, where ``a [CHUNK, CHUNK]`` is strictly lower triangular and CHUNK is at most 4 *
    SUB. Blocks of SUB on the diagonal are inverted row by row, because products of their powers would cancel; what
    is left is nilpotent: its fourth power is 0."""
    row = tl.arange(0, CHUNK)
    same = (row[:, None] // SUB) == (row[None, :] // SUB)
    own = tl.where(same, -a, 0.0)
    found = own
    for i in range(1, SUB):
        line = tl.sum(tl.where((row % SUB == i)[:, None], own, 0.0), 0)  # row i of every block: their columns differ
        line += tl.sum(tl.reshape(line, [CHUNK, 1]) * found, 0)
        found = tl.where((row % SUB == i)[:, None] & same, line[None, :], found)
    found += tl.where(row[:, None] == row[None, :], 1.0, 0.0)
    rest = tl.dot(found, tl.where(same, 0.0, a), input_precision="tf32x3")
    square = tl.dot(rest, rest, input_precision="tf32x3")
    result = found + tl.dot(square, found, input_precision="tf32x3")
    return result - tl.dot(rest, result, input_precision="tf32x3")


@triton.jit
def _pairs_by_channel(
    x, k, total, CHUNK: tl.constexpr, SUB: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr
):
    """Return the sum over channels of ``x[i] * k[j] * exp(total[i] - total[j])`` for ``j <= i``, ``[CHUNK, CHUNK]``;
    other elements are undefined. No exponent is positive, so that strong decays do not overflow: pairs of different blocks
    of SUB tokens are products relative to the token before the later block, pairs within a block are computed directly."""
    row = tl.arange(0, CHUNK)
    pairs = tl.zeros([CHUNK, CHUNK], tl.float32)
    for block in tl.static_range(1, CHUNK // SUB):
        begin = tl.sum(tl.where((row == block * SUB - 1)[:, None], total, 0.0), 0)[None, :]
        left = tl.where((row // SUB == block)[:, None], x * tl.exp(tl.minimum(total - begin, 0.0)), 0.0)
        right = tl.where((row < block * SUB)[:, None], k * tl.exp(tl.minimum(begin - total, 0.0)), 0.0)
        pairs += tl.dot(left, tl.trans(right), input_precision=PRECISION)
    sub = tl.arange(0, SUB)[None, :, None]
    xs = tl.reshape(x, [CHUNK // SUB, SUB, BLOCK])
    ks = tl.reshape(k, [CHUNK // SUB, SUB, BLOCK])
    totals = tl.reshape(total, [CHUNK // SUB, SUB, BLOCK])
    for j in range(SUB):
        k_j = tl.sum(tl.where(sub == j, ks, 0.0), 1)[:, None, :]
        total_j = tl.sum(tl.where(sub == j, totals, 0.0), 1)[:, None, :]
        column = tl.sum(xs * k_j * tl.exp(tl.minimum(totals - total_j, 0.0)), 2)
        at = (row // SUB) * SUB + j
        pairs = tl.where(row[None, :] == at[:, None], tl.reshape(column, [CHUNK, 1]), pairs)
    return pairs


@triton.jit
def _totals(a, bias, rate, at, inside, a_stride, head, heads, BY_CHANNEL: tl.constexpr, KEY: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Return the logarithm of the decay from the beginning of the chunk to each token, a column or ``[CHUNK,
    BLOCK_K]``."""
    speed = -tl.load(rate + head)
    if BY_CHANNEL:
        channel = tl.arange(0, BLOCK_K)[None, :]
        real = inside[:, None] & (channel < KEY)
        x = tl.load(a + at[:, None] * a_stride + head * KEY + channel, real, 0.0).to(tl.float32)
        x += tl.load(bias + head * KEY + channel, channel < KEY, 0.0)
        return tl.cumsum(tl.where(real, speed * _softplus(x), 0.0), 0)
    else:
        x = tl.load(a + at * a_stride + head, inside, 0.0).to(tl.float32) + tl.load(bias + head)
        return tl.cumsum(tl.where(inside, speed * _softplus(x), 0.0), 0)[:, None]


@triton.jit
def _solve(
    qkv, a, b, rate, bias, totals, reads, changes, indptr, chunk_rows, chunk_starts, qkv_stride, a_stride, b_stride,
    heads, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BY_CHANNEL: tl.constexpr, CHUNK: tl.constexpr,
    SUB: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Store what each token reads of the state before its chunk, ``T (beta k exp(total))``, and how it would change the
    state if that was 0, ``T (beta v)``."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    start, end = tl.load(chunk_starts + chunk), tl.load(indptr + tl.load(chunk_rows + chunk) + 1)
    row = tl.arange(0, CHUNK)
    at = (start + row).to(tl.int64)
    inside = start + row < end
    channel = tl.arange(0, BLOCK_K)[None, :]
    key = inside[:, None] & (channel < KEY)
    key_width = heads // GROUP * KEY
    raw = tl.load(qkv + at[:, None] * qkv_stride + key_width + head // GROUP * KEY + channel, key, 0.0)
    k = raw.to(tl.float32)
    length = _inverse_length(k)
    k *= length
    total = _totals(a, bias, rate, at, inside, a_stride, head, heads, BY_CHANNEL, KEY, BLOCK_K)
    beta = tl.sigmoid(tl.load(b + at * b_stride + head, inside, 0.0).to(tl.float32))[:, None]
    if BY_CHANNEL:
        tl.store(totals + (at[:, None] * heads + head) * KEY + channel, total, key)
        pairs = _pairs_by_channel(k, k, total, CHUNK, SUB, BLOCK_K, PRECISION)
    else:
        tl.store(totals + at[:, None] * heads + head, total, inside[:, None])
        pairs = tl.dot(raw, tl.trans(raw), input_precision=PRECISION) * length * tl.trans(length)
        pairs *= tl.exp(tl.minimum(total - tl.trans(total), 0.0))
    lower = (row[:, None] > row[None, :]) & inside[:, None]
    T = _inverse(tl.where(lower, pairs * beta, 0.0), CHUNK, SUB)
    tl.debug_barrier()  # other threads have written the totals that are read below
    for first in range(0, KEY, BLOCK_V):  # read again, because the registers are needed for the inverse
        place = first + tl.arange(0, BLOCK_V)[None, :]
        real = inside[:, None] & (place < KEY)
        part = tl.load(qkv + at[:, None] * qkv_stride + key_width + head // GROUP * KEY + place, real, 0.0).to(
            tl.float32
        )
        if BY_CHANNEL:
            part *= tl.exp(tl.load(totals + (at[:, None] * heads + head) * KEY + place, real, 0.0))
        else:
            part *= tl.exp(total)
        read = tl.dot(T, part * length * beta, input_precision=PRECISION)
        tl.store(reads + (at[:, None] * heads + head) * KEY + place, read.to(reads.dtype.element_ty), real)
    for first in range(0, VALUE, BLOCK_V):
        place = first + tl.arange(0, BLOCK_V)[None, :]
        real = inside[:, None] & (place < VALUE)
        v = tl.load(qkv + at[:, None] * qkv_stride + 2 * key_width + head * VALUE + place, real, 0.0)
        change = tl.dot(T, v.to(tl.float32) * beta, input_precision=PRECISION)
        tl.store(changes + (at[:, None] * heads + head) * VALUE + place, change.to(changes.dtype.element_ty), real)


@triton.jit
def _pass(
    qkv, totals, reads, changes, before, state, slots, indptr, fresh, first_chunks, chunk_starts, qkv_stride, state_stride,
    heads, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BY_CHANNEL: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, WRITES: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Store the state before every chunk of a row, overwrite ``changes`` with those that the state before allows, and
    write the state after the row."""
    place = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    head, row = tl.program_id(1), tl.program_id(2)
    channel = tl.arange(0, BLOCK_K)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + row).to(tl.int64)
    known = tl.where((tl.load(fresh + row) == 0) & (slot != 0), KEY, 0)
    first, last, end = tl.load(first_chunks + row), tl.load(first_chunks + row + 1), tl.load(indptr + row + 1)
    real = (place < VALUE)[None, :]
    inside_state = (channel < KEY)[:, None] & real
    own = slot * state_stride + head * KEY * VALUE + channel[:, None] * VALUE + place[None, :]
    S = tl.load(state + own, (channel < known)[:, None] & real, 0.0)
    key_width = heads // GROUP * KEY
    step = tl.arange(0, CHUNK)
    for index in range(last - first):
        chunk = first.to(tl.int64) + index
        kept = (chunk * heads + head) * KEY * VALUE + channel[:, None] * VALUE + place[None, :]
        tl.store(before + kept, S.to(before.dtype.element_ty), inside_state)
        start = tl.load(chunk_starts + chunk)
        at = (start + step).to(tl.int64)
        inside = start + step < end
        key = inside[:, None] & (channel < KEY)[None, :]
        k = tl.load(qkv + at[:, None] * qkv_stride + key_width + head // GROUP * KEY + channel[None, :], key, 0.0)
        k = k.to(tl.float32)
        k *= _inverse_length(k)
        read = tl.load(reads + (at[:, None] * heads + head) * KEY + channel[None, :], key, 0.0)
        value = (at[:, None] * heads + head) * VALUE + place[None, :]
        change = tl.load(changes + value, inside[:, None] & real, 0.0).to(tl.float32)
        change -= tl.dot(read, S.to(read.dtype), input_precision=PRECISION)
        rounded = change.to(read.dtype)
        tl.store(changes + value, rounded, inside[:, None] & real)
        final = (tl.minimum(start + CHUNK, end) - 1).to(tl.int64)
        if BY_CHANNEL:
            total = tl.load(totals + (at[:, None] * heads + head) * KEY + channel[None, :], key, 0.0)
            whole = tl.load(totals + (final * heads + head) * KEY + channel, channel < KEY, 0.0)
            k *= tl.exp(tl.minimum(whole[None, :] - total, 0.0))
            S *= tl.exp(whole)[:, None]
        else:
            total = tl.load(totals + at * heads + head, inside, 0.0)
            whole = tl.load(totals + final * heads + head)
            k *= tl.exp(tl.minimum(whole - total, 0.0))[:, None]
            S *= tl.exp(whole)
        S += tl.dot(tl.trans(k.to(read.dtype)), rounded, input_precision=PRECISION)
    if WRITES:
        written = tl.where((slot != 0) & (last > first), KEY, 0)
        tl.store(state + own, S, (channel < written)[:, None] & real)


@triton.jit
def _outputs(
    qkv, totals, changes, before, out, indptr, chunk_rows, chunk_starts, qkv_stride, heads, scale,
    GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BY_CHANNEL: tl.constexpr, CHUNK: tl.constexpr,
    SUB: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    chunk, head = tl.program_id(0), tl.program_id(1)
    place = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    start, end = tl.load(chunk_starts + chunk), tl.load(indptr + tl.load(chunk_rows + chunk) + 1)
    step = tl.arange(0, CHUNK)
    at = (start + step).to(tl.int64)
    inside = start + step < end
    channel = tl.arange(0, BLOCK_K)
    key = inside[:, None] & (channel < KEY)[None, :]
    real = inside[:, None] & (place < VALUE)[None, :]
    key_width = heads // GROUP * KEY
    source = qkv + at[:, None] * qkv_stride + head // GROUP * KEY + channel[None, :]
    raw_q, raw_k = tl.load(source, key, 0.0), tl.load(source + key_width, key, 0.0)
    q, k = raw_q.to(tl.float32), raw_k.to(tl.float32)
    q_length, k_length = _inverse_length(q), _inverse_length(k)
    q *= q_length
    if BY_CHANNEL:
        total = tl.load(totals + (at[:, None] * heads + head) * KEY + channel[None, :], key, 0.0)
        pairs = _pairs_by_channel(q, k * k_length, total, CHUNK, SUB, BLOCK_K, PRECISION)
    else:
        total = tl.load(totals + at * heads + head, inside, 0.0)[:, None]
        pairs = tl.dot(raw_q, tl.trans(raw_k), input_precision=PRECISION) * q_length * tl.trans(k_length)
        pairs *= tl.exp(tl.minimum(total - tl.trans(total), 0.0))
    pairs = tl.where((step[:, None] >= step[None, :]) & inside[None, :], pairs, 0.0)
    value = (at[:, None] * heads + head) * VALUE + place[None, :]
    change = tl.load(changes + value, real, 0.0)
    kept = (chunk.to(tl.int64) * heads + head) * KEY * VALUE + channel[:, None] * VALUE + place[None, :]
    S = tl.load(before + kept, (channel < KEY)[:, None] & (place < VALUE)[None, :], 0.0)
    result = tl.dot((q * tl.exp(total)).to(S.dtype), S, input_precision=PRECISION)
    result = tl.dot(pairs.to(change.dtype), change, result, input_precision=PRECISION)
    tl.store(out + value, (result * scale).to(out.dtype.element_ty), real)


@triton.jit
def _changed(
    S, keys, a, b, rate, bias, head, channel, place, key, real, key_width,
    GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Return the state ``S`` after one token, whose keys are at ``keys``, with ``a`` and ``b`` of all heads."""
    k = tl.load(keys + head // GROUP * KEY + channel, key, 0.0).to(tl.float32)
    v = tl.load(keys + key_width + head * VALUE + place, real, 0.0).to(tl.float32)
    k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    beta = tl.sigmoid(tl.load(b + head).to(tl.float32))
    speed = -tl.load(rate + head)
    if BY_CHANNEL:
        x = tl.load(a + head * KEY + channel, key, 0.0).to(tl.float32)
        S *= tl.exp(speed * _softplus(x + tl.load(bias + head * KEY + channel, key, 0.0)))[:, None]
    else:
        S *= tl.exp(speed * _softplus(tl.load(a + head).to(tl.float32) + tl.load(bias + head)))
    change = (v - tl.sum(S * k[:, None], 0)) * beta
    return S + k[:, None] * change[None, :]


@triton.jit
def _advance(
    qkv, a, b, rate, bias, state, slots, starts, counts, qkv_stride, a_stride, b_stride, state_stride, heads,
    GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BY_CHANNEL: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    place = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    head, row = tl.program_id(1), tl.program_id(2)
    channel = tl.arange(0, BLOCK_K)
    key, real = channel < KEY, place < VALUE
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + row).to(tl.int64)
    count = tl.load(counts + row)
    if (slot != 0) & (count > 0):
        first = tl.load(starts + row).to(tl.int64)
        own = state + slot * state_stride + head * KEY * VALUE + channel[:, None] * VALUE + place[None, :]
        S = tl.load(own, key[:, None] & real[None, :], 0.0)
        key_width = heads // GROUP * KEY
        for index in range(count):
            token = first + index
            S = _changed(
                S, qkv + token * qkv_stride + key_width, a + token * a_stride, b + token * b_stride, rate, bias, head,
                channel, place, key, real, key_width, GROUP, KEY, VALUE, BY_CHANNEL,
            )  # fmt: skip
        tl.store(own, S, key[:, None] & real[None, :])


@triton.jit
def _step(
    qkv, a, b, rate, bias, state, out, slots, qkv_stride, a_stride, b_stride, state_stride, heads, scale,
    GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BY_CHANNEL: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    place = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    head, token = tl.program_id(1), tl.program_id(2).to(tl.int64)
    channel = tl.arange(0, BLOCK_K)
    key, real = channel < KEY, place < VALUE
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + token).to(tl.int64)
    known = tl.where(slot != 0, KEY, 0)
    own = state + slot * state_stride + head * KEY * VALUE + channel[:, None] * VALUE + place[None, :]
    kept = (channel < known)[:, None] & real[None, :]
    S = tl.load(own, kept, 0.0)
    key_width = heads // GROUP * KEY
    source = qkv + token * qkv_stride
    q = tl.load(source + head // GROUP * KEY + channel, key, 0.0).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
    S = _changed(
        S, source + key_width, a + token * a_stride, b + token * b_stride, rate, bias, head, channel, place,
        key, real, key_width, GROUP, KEY, VALUE, BY_CHANNEL,
    )  # fmt: skip
    tl.store(own, S, kept)
    result = tl.sum(S * q[:, None], 0)
    tl.store(out + (token * heads + head) * VALUE + place, result.to(out.dtype.element_ty), real)


def gated_delta(
    qkv: torch.Tensor, gates: DeltaGates, state: torch.Tensor, rows: StateRows, shape: DeltaShape
) -> torch.Tensor:
    """Compute ``ops.gated_delta.gated_delta``."""
    heads, key_dim, value_dim = shape.state
    out = torch.empty(len(qkv), heads, value_dim, dtype=qkv.dtype, device=qkv.device)
    chunks = len(rows.chunk_rows)
    if not chunks:
        return out
    _check(qkv, gates, state, shape)
    assert rows.chunk in (_SUB, 2 * _SUB, 4 * _SUB)
    totals = torch.empty(gates.a.shape, dtype=torch.float32, device=qkv.device)
    reads = torch.empty(len(qkv), heads, key_dim, dtype=qkv.dtype, device=qkv.device)
    changes = torch.empty_like(out)
    before = torch.empty(chunks, heads, key_dim, value_dim, dtype=qkv.dtype, device=qkv.device)
    precision = "tf32x3" if qkv.dtype == torch.float32 else "tf32"
    constants = _constants(shape, gates) | {"CHUNK": rows.chunk, "PRECISION": precision}
    block_v = _block(value_dim, 64)
    # in tiles of 16 columns, Triton 3.6 lets 8 warps read beyond the shared memory of a program
    warps = 8 if min(key_dim, value_dim) > 16 else 4
    launch(
        _solve, (chunks, heads),
        qkv, gates.a, gates.b, gates.rate, gates.bias, totals, reads, changes, rows.indptr, rows.chunk_rows,
        rows.chunk_starts, qkv.stride(0), gates.a.stride(0), gates.b.stride(0), heads,
        **constants, SUB=_SUB, BLOCK_V=block_v, num_warps=warps,
    )  # fmt: skip
    narrow = _block(value_dim, 32)
    launch(
        _pass, (triton.cdiv(value_dim, narrow), heads, len(rows.lens)),
        qkv, totals, reads, changes, before, state, rows.slots, rows.indptr, rows.fresh, rows.first_chunks,
        rows.chunk_starts, qkv.stride(0), state.stride(0), heads,
        **constants, BLOCK_V=narrow, WRITES=rows.writes, num_stages=2,
    )  # fmt: skip
    launch(
        _outputs, (chunks, heads, triton.cdiv(value_dim, block_v)),
        qkv, totals, changes, before, out, rows.indptr, rows.chunk_rows, rows.chunk_starts, qkv.stride(0), heads,
        key_dim**-0.5,
        **constants, SUB=_SUB, BLOCK_V=block_v, num_warps=8,
    )  # fmt: skip
    return out


def gated_delta_step(
    qkv: torch.Tensor, gates: DeltaGates, state: torch.Tensor, slots: torch.Tensor, shape: DeltaShape
) -> torch.Tensor:
    """Compute ``ops.gated_delta.gated_delta_step``."""
    heads, key_dim, value_dim = shape.state
    out = torch.empty(len(qkv), heads, value_dim, dtype=qkv.dtype, device=qkv.device)
    if len(qkv):
        _check(qkv, gates, state, shape)
        block_v = _block(value_dim, 32)
        launch(
            _step, (triton.cdiv(value_dim, block_v), heads, len(qkv)),
            qkv, gates.a, gates.b, gates.rate, gates.bias, state, out, slots, qkv.stride(0), gates.a.stride(0),
            gates.b.stride(0), state.stride(0), heads, key_dim**-0.5,
            **_constants(shape, gates), BLOCK_V=block_v,
        )  # fmt: skip
    return out


def gated_delta_advance(
    qkv: torch.Tensor,
    gates: DeltaGates,
    state: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    shape: DeltaShape,
) -> None:
    """Compute ``ops.gated_delta.gated_delta_advance``."""
    heads, _, value_dim = shape.state
    _check(qkv, gates, state, shape)
    block_v = _block(value_dim, 32)
    launch(
        _advance, (triton.cdiv(value_dim, block_v), heads, len(slots)),
        qkv, gates.a, gates.b, gates.rate, gates.bias, state, slots, starts, counts, qkv.stride(0), gates.a.stride(0),
        gates.b.stride(0), state.stride(0), heads,
        **_constants(shape, gates), BLOCK_V=block_v,
    )  # fmt: skip


def _block(size: int, limit: int) -> int:
    return min(limit, max(16, triton.next_power_of_2(size)))


def _constants(shape: DeltaShape, gates: DeltaGates) -> dict[str, Any]:
    return {
        "GROUP": shape.value_heads // shape.key_heads,
        "KEY": shape.key_dim,
        "VALUE": shape.value_dim,
        "BY_CHANNEL": gates.by_channel,
        "BLOCK_K": max(16, triton.next_power_of_2(shape.key_dim)),
    }


def _check(qkv: torch.Tensor, gates: DeltaGates, state: torch.Tensor, shape: DeltaShape) -> None:
    assert qkv.stride(1) == gates.b.stride(1) == gates.a.stride(-1) == 1
    assert gates.a.ndim == 2 or gates.a.stride(1) == shape.key_dim
    assert gates.rate.dtype == gates.bias.dtype == state.dtype == torch.float32
    assert gates.bias.is_contiguous()
    assert state[0].is_contiguous()
    assert state.shape[1:] == shape.state
