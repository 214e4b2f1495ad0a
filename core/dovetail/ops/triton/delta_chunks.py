"""Compute the gated delta rule of prompts, with one decay for each head.

There are three kernels. The first solves the triangular system of every chunk and head, whose right sides are the values
and what the keys read of the state before the chunk. The second passes through the chunks of a row, a block of value
channels in each program, with the state in registers. The third computes the outputs of every chunk.

``T`` in the names of variables is the inverse of the system's matrix, ``total`` the logarithm of the decay since the
beginning of the chunk. Factors of tokens multiply products, or small matrices before them, so that keys and queries enter
the tensor cores as they are stored.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.ssd import ROWS, softplus


@triton.jit
def inverse_length(x):
    """Return what normalises the rows of ``x``, a column."""
    return tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) + 1e-6)


@triton.jit
def inverse(a, CHUNK: tl.constexpr, DOUBLINGS: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of ``I + a``, where ``a [CHUNK, CHUNK]`` is strictly lower triangular and CHUNK is ``2 **
    (DOUBLINGS + 1)``: of blocks of 2 on the diagonal, then of blocks twice as large each time. No sum cancels as those of
    powers of ``a`` would: all that is added up are elements of inverses of blocks, which are at most 1 for keys of length 1
    and strengths up to 1."""
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    found = tl.where(row == column, 1.0, tl.where(row // 2 == column // 2, -a, 0.0))
    for level in tl.static_range(1, DOUBLINGS + 1):
        between = (row // 2 ** (level + 1) == column // 2 ** (level + 1)) & (row // 2**level != column // 2**level)
        rest = tl.dot(tl.where(between, -a, 0.0), found, input_precision=PRECISION)
        found = tl.dot(found, rest, found, input_precision=PRECISION)
    return found


@triton.jit(do_not_specialize_on_alignment=ROWS)
def solve(
    qkv, a, b, rate, bias, totals, fades, decays, reads, changes, indptr, chunk_rows, chunk_starts, qkv_stride, a_stride,
    b_stride, heads, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr,
    DOUBLINGS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Store what each token reads of the state before its chunk, ``T (beta k exp(total))``, and how it would change the
    state if that was 0, ``T (beta v)``; the decay from each token to the end of its chunk, divided by the length of its
    key, and the decay of each chunk."""
    head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    start = tl.load(chunk_starts + chunk)
    end = tl.minimum(start + CHUNK, tl.load(indptr + tl.load(chunk_rows + chunk) + 1))
    row = tl.arange(0, CHUNK)
    at = (start + row).to(tl.int64)
    inside = start + row < end
    channel = tl.arange(0, BLOCK_K)[None, :]
    key = inside[:, None] & (channel < KEY)
    key_width = heads // GROUP * KEY
    k = tl.load(qkv + at[:, None] * qkv_stride + key_width + head // GROUP * KEY + channel, key, 0.0)
    length = inverse_length(k.to(tl.float32))
    same = tl.dot(k, tl.trans(k), input_precision=PRECISION) * length * tl.trans(length)
    lower = (row[:, None] > row[None, :]) & inside[:, None]
    x = tl.load(a + at * a_stride + head, inside, 0.0).to(tl.float32) + tl.load(bias + head)
    speed = tl.where(inside, -tl.load(rate + head) * softplus(x), 0.0)
    total = tl.cumsum(speed, 0)
    whole = tl.sum(tl.where(start + row == end - 1, total, 0.0), 0)  # exactly that of the last token
    total = total[:, None]
    beta = tl.sigmoid(tl.load(b + at * b_stride + head, inside, 0.0).to(tl.float32))[:, None]
    tl.store(totals + at[:, None] * heads + head, total, inside[:, None])
    tl.store(fades + at[:, None] * heads + head, tl.exp(tl.minimum(whole - total, 0.0)) * length, inside[:, None])
    tl.store(decays + chunk * heads + head, tl.exp(whole))
    pairs = same * beta * tl.exp(tl.minimum(total - tl.trans(total), 0.0))
    T = inverse(tl.where(lower, pairs, 0.0), CHUNK, DOUBLINGS, PRECISION)
    read = tl.dot((T * tl.trans(beta * length * tl.exp(total))).to(k.dtype), k, input_precision=PRECISION)
    tl.store(reads + (at[:, None] * heads + head) * KEY + channel, read.to(reads.dtype.element_ty), key)
    T = (T * tl.trans(beta)).to(k.dtype)
    for first in range(0, VALUE, BLOCK_V):
        place = first + tl.arange(0, BLOCK_V)[None, :]
        real = inside[:, None] & (place < VALUE)
        v = tl.load(qkv + at[:, None] * qkv_stride + 2 * key_width + head * VALUE + place, real, 0.0)
        change = tl.dot(T, v, input_precision=PRECISION)
        tl.store(changes + (at[:, None] * heads + head) * VALUE + place, change.to(changes.dtype.element_ty), real)


@triton.jit(do_not_specialize_on_alignment=ROWS)
def pass_states(
    qkv, fades, decays, reads, changes, before, state, slots, indptr, fresh, first_chunks, saves, qkv_stride,
    state_stride, heads, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, WRITES: tl.constexpr, SAVES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Store the state before every chunk of a row, overwrite ``changes`` with those that the state before allows, and
    write the state after the row. With ``SAVES``, write the states after chunks to the slots ``saves`` too."""
    place = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    head, row = tl.program_id(1), tl.program_id(2)
    channel = tl.arange(0, BLOCK_K)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + row).to(tl.int64)
    known = tl.where((tl.load(fresh + row) == 0) & (slot != 0), KEY, 0)
    start, end = tl.load(indptr + row), tl.load(indptr + row + 1)
    real = (place < VALUE)[None, :]
    inside_state = (channel < KEY)[:, None] & real
    within = channel[:, None] * VALUE + place[None, :]
    own = slot * state_stride + head * KEY * VALUE + within
    S = tl.load(state + own, (channel < known)[:, None] & real, 0.0).to(tl.float32)
    keys = qkv + heads // GROUP * KEY + head // GROUP * KEY + channel[None, :]
    step = tl.arange(0, CHUNK)
    chunk = tl.load(first_chunks + row).to(tl.int64)
    for first in range(start, end, CHUNK):
        at = (first + step).to(tl.int64)
        inside = first + step < end
        key = inside[:, None] & (channel < KEY)[None, :]
        k = tl.load(keys + at[:, None] * qkv_stride, key, 0.0)
        read = tl.load(reads + (at[:, None] * heads + head) * KEY + channel[None, :], key, 0.0)
        value = (at[:, None] * heads + head) * VALUE + place[None, :]
        change = tl.load(changes + value, inside[:, None] & real, 0.0).to(tl.float32)
        fade = tl.load(fades + at * heads + head, inside, 0.0)[:, None]
        decay = tl.load(decays + chunk * heads + head)
        rounded = S.to(before.dtype.element_ty)
        tl.store(before + (chunk * heads + head) * KEY * VALUE + within, rounded, inside_state)
        change -= tl.dot(read, rounded, input_precision=PRECISION)
        tl.store(changes + value, change.to(changes.dtype.element_ty), inside[:, None] & real)
        S = tl.dot(tl.trans(k), (change * fade).to(k.dtype), S * decay, input_precision=PRECISION)
        if SAVES:
            target = tl.load(saves + chunk).to(tl.int64)
            kept = (channel < tl.where(target != 0, KEY, 0))[:, None] & real
            tl.store(state + target * state_stride + head * KEY * VALUE + within, S, kept)
        chunk += 1
    if WRITES:
        written = tl.where((slot != 0) & (end > start), KEY, 0)
        tl.store(state + own, S, (channel < written)[:, None] & real)


@triton.jit(do_not_specialize_on_alignment=ROWS)
def outputs(
    qkv, totals, changes, before, out, indptr, chunk_rows, chunk_starts, qkv_stride, heads, scale, GROUP: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Store what each token reads of the state before its chunk and of the changes by the chunk's tokens up to it."""
    head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    start = tl.load(chunk_starts + chunk)
    end = tl.minimum(start + CHUNK, tl.load(indptr + tl.load(chunk_rows + chunk) + 1))
    step = tl.arange(0, CHUNK)
    at = (start + step).to(tl.int64)
    inside = start + step < end
    channel = tl.arange(0, BLOCK_K)
    key = inside[:, None] & (channel < KEY)[None, :]
    source = qkv + at[:, None] * qkv_stride + head // GROUP * KEY + channel[None, :]
    q, k = tl.load(source, key, 0.0), tl.load(source + heads // GROUP * KEY, key, 0.0)
    length = inverse_length(q.to(tl.float32)) * scale
    same = tl.dot(q, tl.trans(k), input_precision=PRECISION) * length * tl.trans(inverse_length(k.to(tl.float32)))
    same = tl.where((step[:, None] >= step[None, :]) & inside[None, :], same, 0.0)
    total = tl.load(totals + at * heads + head, inside, 0.0)[:, None]
    pairs = (same * tl.exp(tl.minimum(total - tl.trans(total), 0.0))).to(q.dtype)
    for first in range(0, VALUE, BLOCK_V):
        place = first + tl.arange(0, BLOCK_V)
        value = (at[:, None] * heads + head) * VALUE + place[None, :]
        real = inside[:, None] & (place < VALUE)[None, :]
        change = tl.load(changes + value, real, 0.0)
        kept = (chunk * heads + head) * KEY * VALUE + channel[:, None] * VALUE + place[None, :]
        S = tl.load(before + kept, (channel < KEY)[:, None] & (place < VALUE)[None, :], 0.0)
        result = tl.dot(q, S, input_precision=PRECISION) * (length * tl.exp(total))
        result = tl.dot(pairs, change, result, input_precision=PRECISION)
        tl.store(out + value, result.to(out.dtype.element_ty), real)
