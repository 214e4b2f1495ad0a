"""Compute causal convolutions over four tokens with few and wide accesses to memory: of prompts, in programs that read each
input once, and of decode rows in 16 bits, in words of four numbers. ``short_conv`` calls them."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.ssd import ROWS

WIDTH = 4
BEFORE = tl.constexpr(WIDTH - 1)


@triton.jit
def activated(total, SILU: tl.constexpr):
    """Return the activation of sums in float32."""
    return total * tl.sigmoid(total) if SILU else total


@triton.jit
def shift(x, own, channel, begin, length, known, x_stride, inside, BEFORE: tl.constexpr):
    """Write the state after ``length`` tokens from ``begin`` on to ``own``, of which ``known`` inputs are read."""
    for i in tl.static_range(BEFORE):  # place i is read before it is written: its source is never before it
        source = length + i + tl.zeros_like(channel)  # from the beginning of the state on
        old = tl.load(own + source, inside & (source < known), 0.0)
        place = x + (begin + source - BEFORE).to(tl.int64) * x_stride + channel
        new = tl.load(place, inside & (source >= BEFORE), 0.0)
        kept = tl.where(source < BEFORE, old.to(tl.float32), new.to(tl.float32))
        tl.debug_barrier()  # other threads may have read the state before
        tl.store(own + i, kept.to(own.dtype.element_ty), inside)


@triton.jit
def _input(x, inside):
    return tl.load(x, inside, 0.0).to(tl.float32)


@triton.jit
def _store(out, inside, x0, x1, x2, x3, w0, w1, w2, w3, first, SILU: tl.constexpr):
    total = activated(first + x0 * w0 + x1 * w1 + x2 * w2 + x3 * w3, SILU)
    tl.store(out, total.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize_on_alignment=ROWS)
def chunks(
    x, weight, bias, state, out, slots, indptr, fresh, chunk_rows, chunk_starts, saves, channels, x_stride,
    state_stride, BIAS: tl.constexpr, SILU: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    WRITES: tl.constexpr, SAVES: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a chunk of a row for a block of channels, eight tokens at a time, of which the inputs are read together. The last
    three inputs stay in registers. The program of a row's first chunk also writes the state, because it is the only
    one that reads the old one. That of a chunk that is saved writes the chunk's last inputs to the slot of ``saves``."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    w0 = tl.load(weight + channel * 4, inside, 0.0).to(tl.float32)
    w1 = tl.load(weight + channel * 4 + 1, inside, 0.0).to(tl.float32)
    w2 = tl.load(weight + channel * 4 + 2, inside, 0.0).to(tl.float32)
    w3 = tl.load(weight + channel * 4 + 3, inside, 0.0).to(tl.float32)
    added = tl.load(bias + channel, inside, 0.0).to(tl.float32) if BIAS else tl.zeros([BLOCK], tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    chunk = tl.program_id(1)
    row, start = tl.load(chunk_rows + chunk), tl.load(chunk_starts + chunk)
    begin, end = tl.load(indptr + row), tl.load(indptr + row + 1)
    slot = tl.load(slots + row).to(tl.int64)
    known = tl.where((tl.load(fresh + row) == 0) & (slot != 0), BEFORE, 0)  # inputs that the state holds
    own = state + slot * state_stride + channel * BEFORE
    count = tl.minimum(end - start, CHUNK)
    source = x + start.to(tl.int64) * x_stride + channel
    offset = start - begin + tl.zeros_like(channel)
    earlier, kept = inside & (offset > 0), inside & (offset < known)
    x0 = tl.load(source - 3 * x_stride, earlier, 0.0).to(tl.float32) + tl.load(own, kept, 0.0).to(tl.float32)
    x1 = tl.load(source - 2 * x_stride, earlier, 0.0).to(tl.float32) + tl.load(own + 1, kept, 0.0).to(tl.float32)
    x2 = tl.load(source - x_stride, earlier, 0.0).to(tl.float32) + tl.load(own + 2, kept, 0.0).to(tl.float32)
    target = out + start.to(tl.int64) * channels + channel
    for token in range(0, count, 8):
        left = count - token + tl.zeros_like(channel)
        x3 = _input(source, inside & (left > 0))
        x4 = _input(source + x_stride, inside & (left > 1))
        x5 = _input(source + 2 * x_stride, inside & (left > 2))
        x6 = _input(source + 3 * x_stride, inside & (left > 3))
        x7 = _input(source + 4 * x_stride, inside & (left > 4))
        x8 = _input(source + 5 * x_stride, inside & (left > 5))
        x9 = _input(source + 6 * x_stride, inside & (left > 6))
        x10 = _input(source + 7 * x_stride, inside & (left > 7))
        _store(target, inside & (left > 0), x0, x1, x2, x3, w0, w1, w2, w3, added, SILU)
        _store(target + channels, inside & (left > 1), x1, x2, x3, x4, w0, w1, w2, w3, added, SILU)
        _store(target + 2 * channels, inside & (left > 2), x2, x3, x4, x5, w0, w1, w2, w3, added, SILU)
        _store(target + 3 * channels, inside & (left > 3), x3, x4, x5, x6, w0, w1, w2, w3, added, SILU)
        _store(target + 4 * channels, inside & (left > 4), x4, x5, x6, x7, w0, w1, w2, w3, added, SILU)
        _store(target + 5 * channels, inside & (left > 5), x5, x6, x7, x8, w0, w1, w2, w3, added, SILU)
        _store(target + 6 * channels, inside & (left > 6), x6, x7, x8, x9, w0, w1, w2, w3, added, SILU)
        _store(target + 7 * channels, inside & (left > 7), x7, x8, x9, x10, w0, w1, w2, w3, added, SILU)
        x0, x1, x2 = x8, x9, x10
        source += 8 * x_stride
        target += 8 * channels
    if SAVES:
        goal = tl.load(saves + chunk).to(tl.int64)
        if goal != 0:
            for i in tl.static_range(BEFORE):
                place = x + (start + CHUNK - BEFORE + i).to(tl.int64) * x_stride + channel
                last = tl.load(place, inside, 0.0)
                tl.store(state + goal * state_stride + channel * BEFORE + i, last.to(state.dtype.element_ty), inside)
    if WRITES:  # noqa: SIM102 a constant
        if (start == begin) & (slot != 0):
            shift(x, own, channel, begin, end - begin, known, x_stride, inside, BEFORE)


@triton.jit
def _number(word, place: tl.constexpr, kind: tl.constexpr):
    """Return the number in 16 bits at ``place`` of words of four, in float32."""
    return (word >> (16 * place)).to(tl.int16).to(kind, bitcast=True).to(tl.float32)


@triton.jit
def _bits(word, place: tl.constexpr):
    return (word >> (16 * place)) & 0xFFFF


@triton.jit
def _result(x, w, added, s0, s1, s2, at: tl.constexpr, SILU: tl.constexpr, kind: tl.constexpr):
    """Return the bits of an output at place ``at`` of its word, of the input ``x``, the state ``s0, s1, s2`` and the word ``w`` of
    weights."""
    total = x * _number(w, 3, kind) + added
    total += s0 * _number(w, 0, kind)
    total += s1 * _number(w, 1, kind)
    total += s2 * _number(w, 2, kind)
    found = activated(total, SILU).to(kind).to(tl.int16, bitcast=True).to(tl.int64)
    return (found & 0xFFFF) << (16 * at)


@triton.jit(do_not_specialize_on_alignment=ROWS)
def step(
    x, weight, bias, state, out, slots, words, x_stride, state_stride,
    BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Compute decode rows of numbers in 16 bits. ``words`` counts groups of four channels, of which the inputs are one word and
    the states three: the states of channel c are numbers ``[3 c, 3 c + 3)`` of twelve."""
    kind: tl.constexpr = x.dtype.element_ty
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    inside = group < words
    weights = weight.to(tl.pointer_type(tl.int64), bitcast=True) + group * 4
    w0, w1 = tl.load(weights, inside, 0), tl.load(weights + 1, inside, 0)
    w2, w3 = tl.load(weights + 2, inside, 0), tl.load(weights + 3, inside, 0)
    added = tl.load(bias.to(tl.pointer_type(tl.int64), bitcast=True) + group, inside, 0) if BIAS else tl.zeros_like(w0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + row).to(tl.int64)
    own = (state + slot * state_stride).to(tl.pointer_type(tl.int64), bitcast=True) + group * 3
    real = inside & (slot + tl.zeros_like(group) != 0)
    last = tl.load((x + row * x_stride).to(tl.pointer_type(tl.int64), bitcast=True) + group, inside, 0)
    a, b, c = tl.load(own, real, 0), tl.load(own + 1, real, 0), tl.load(own + 2, real, 0)
    found = _result(
        _number(last, 0, kind), w0, _number(added, 0, kind), _number(a, 0, kind), _number(a, 1, kind),
        _number(a, 2, kind), 0, SILU, kind,
    )  # fmt: skip
    found |= _result(
        _number(last, 1, kind), w1, _number(added, 1, kind), _number(a, 3, kind), _number(b, 0, kind),
        _number(b, 1, kind), 1, SILU, kind,
    )  # fmt: skip
    found |= _result(
        _number(last, 2, kind), w2, _number(added, 2, kind), _number(b, 2, kind), _number(b, 3, kind),
        _number(c, 0, kind), 2, SILU, kind,
    )  # fmt: skip
    found |= _result(
        _number(last, 3, kind), w3, _number(added, 3, kind), _number(c, 1, kind), _number(c, 2, kind),
        _number(c, 3, kind), 3, SILU, kind,
    )  # fmt: skip
    tl.store((out + row * words * 4).to(tl.pointer_type(tl.int64), bitcast=True) + group, found, inside)
    first = _bits(a, 1) | (_bits(a, 2) << 16) | (_bits(last, 0) << 32) | (_bits(b, 0) << 48)
    second = _bits(b, 1) | (_bits(last, 1) << 16) | (_bits(b, 3) << 32) | (_bits(c, 0) << 48)
    third = _bits(last, 2) | (_bits(c, 2) << 16) | (_bits(c, 3) << 32) | (_bits(last, 3) << 48)
    tl.store(own, first, real)
    tl.store(own + 1, second, real)
    tl.store(own + 2, third, real)
