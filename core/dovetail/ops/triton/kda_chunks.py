"""Compute the gated delta rule of prompts, with a decay for each key channel of a head (Kimi delta attention).

The three kernels are those of ``delta_chunks``, of which the names are explained there. Products of decayed keys are
computed in blocks, so that strong decays do not overflow.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.delta_chunks import inverse, inverse_length
from dovetail.ops.triton.ssd import ROWS, softplus


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
def _totals(a, bias, rate, at, inside, a_stride, head, KEY: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the logarithm of the decay from the beginning of the chunk to each token, ``[CHUNK, BLOCK_K]``."""
    channel = tl.arange(0, BLOCK_K)[None, :]
    real = inside[:, None] & (channel < KEY)
    x = tl.load(a + at[:, None] * a_stride + head * KEY + channel, real, 0.0).to(tl.float32)
    x += tl.load(bias + head * KEY + channel, channel < KEY, 0.0)
    return tl.cumsum(tl.where(real, -tl.load(rate + head) * softplus(x), 0.0), 0)


@triton.jit(do_not_specialize_on_alignment=ROWS)
def solve(
    qkv, a, b, rate, bias, totals, reads, changes, indptr, chunk_rows, chunk_starts, qkv_stride, a_stride, b_stride,
    heads, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr,
    SUB: tl.constexpr, DOUBLINGS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
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
    length = inverse_length(k)
    k *= length
    total = _totals(a, bias, rate, at, inside, a_stride, head, KEY, BLOCK_K)
    beta = tl.sigmoid(tl.load(b + at * b_stride + head, inside, 0.0).to(tl.float32))[:, None]
    tl.store(totals + (at[:, None] * heads + head) * KEY + channel, total, key)
    pairs = _pairs_by_channel(k, k, total, CHUNK, SUB, BLOCK_K, PRECISION)
    lower = (row[:, None] > row[None, :]) & inside[:, None]
    T = inverse(tl.where(lower, pairs * beta, 0.0), CHUNK, DOUBLINGS, PRECISION)
    tl.debug_barrier()  # other threads have written the totals that are read below
    for first in range(0, KEY, BLOCK_V):  # read again, because the registers are needed for the inverse
        place = first + tl.arange(0, BLOCK_V)[None, :]
        real = inside[:, None] & (place < KEY)
        part = tl.load(qkv + at[:, None] * qkv_stride + key_width + head // GROUP * KEY + place, real, 0.0).to(
            tl.float32
        )
        part *= tl.exp(tl.load(totals + (at[:, None] * heads + head) * KEY + place, real, 0.0))
        read = tl.dot(T, part * length * beta, input_precision=PRECISION)
        tl.store(reads + (at[:, None] * heads + head) * KEY + place, read.to(reads.dtype.element_ty), real)
    for first in range(0, VALUE, BLOCK_V):
        place = first + tl.arange(0, BLOCK_V)[None, :]
        real = inside[:, None] & (place < VALUE)
        v = tl.load(qkv + at[:, None] * qkv_stride + 2 * key_width + head * VALUE + place, real, 0.0)
        change = tl.dot(T, v.to(tl.float32) * beta, input_precision=PRECISION)
        tl.store(changes + (at[:, None] * heads + head) * VALUE + place, change.to(changes.dtype.element_ty), real)


@triton.jit(do_not_specialize_on_alignment=ROWS)
def pass_states(
    qkv, totals, reads, changes, before, state, slots, indptr, fresh, first_chunks, chunk_starts, saves, qkv_stride,
    state_stride, heads, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, WRITES: tl.constexpr, SAVES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Store the state before every chunk of a row, overwrite ``changes`` with those that the state before allows, and
    write the state after the row, and those after chunks to the slots ``saves``."""
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
    S = tl.load(state + own, (channel < known)[:, None] & real, 0.0).to(tl.float32)
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
        k *= inverse_length(k)
        read = tl.load(reads + (at[:, None] * heads + head) * KEY + channel[None, :], key, 0.0)
        value = (at[:, None] * heads + head) * VALUE + place[None, :]
        change = tl.load(changes + value, inside[:, None] & real, 0.0).to(tl.float32)
        change -= tl.dot(read, S.to(read.dtype), input_precision=PRECISION)
        rounded = change.to(read.dtype)
        tl.store(changes + value, rounded, inside[:, None] & real)
        final = (tl.minimum(start + CHUNK, end) - 1).to(tl.int64)
        total = tl.load(totals + (at[:, None] * heads + head) * KEY + channel[None, :], key, 0.0)
        whole = tl.load(totals + (final * heads + head) * KEY + channel, channel < KEY, 0.0)
        k *= tl.exp(tl.minimum(whole[None, :] - total, 0.0))
        S *= tl.exp(whole)[:, None]
        S += tl.dot(tl.trans(k.to(read.dtype)), rounded, input_precision=PRECISION)
        if SAVES:
            target = tl.load(saves + chunk).to(tl.int64)
            place_of = target * state_stride + head * KEY * VALUE + channel[:, None] * VALUE + place[None, :]
            tl.store(state + place_of, S, (channel < tl.where(target != 0, KEY, 0))[:, None] & real)
    if WRITES:
        written = tl.where((slot != 0) & (last > first), KEY, 0)
        tl.store(state + own, S, (channel < written)[:, None] & real)


@triton.jit(do_not_specialize_on_alignment=ROWS)
def outputs(
    qkv, totals, changes, before, out, indptr, chunk_rows, chunk_starts, qkv_stride, heads, scale,
    GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr,
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
    q_length, k_length = inverse_length(q), inverse_length(k)
    q *= q_length
    total = tl.load(totals + (at[:, None] * heads + head) * KEY + channel[None, :], key, 0.0)
    pairs = _pairs_by_channel(q, k * k_length, total, CHUNK, SUB, BLOCK_K, PRECISION)
    pairs = tl.where((step[:, None] >= step[None, :]) & inside[None, :], pairs, 0.0)
    value = (at[:, None] * heads + head) * VALUE + place[None, :]
    change = tl.load(changes + value, real, 0.0)
    kept = (chunk.to(tl.int64) * heads + head) * KEY * VALUE + channel[:, None] * VALUE + place[None, :]
    S = tl.load(before + kept, (channel < KEY)[:, None] & (place < VALUE)[None, :], 0.0)
    result = tl.dot((q * tl.exp(total)).to(S.dtype), S, input_precision=PRECISION)
    result = tl.dot(pairs.to(change.dtype), change, result, input_precision=PRECISION)
    tl.store(out + value, (result * scale).to(out.dtype.element_ty), real)
