"""Add up and gather tensors of several GPUs of one host through peer memory, in kernels that wait for each other.

Every rank has a buffer of channels in memory that its peers can write to. A channel carries the data of one row (or of
one block of a gathered row) from each rank and has two slots, which successive uses of the channel alternate. An empty
slot is full of ``EMPTY``, a word that no data contains: two zeros of negative sign, which are sent as positive zeros.
A rank stores its data to the slots of its peers and loads from its own slots until no word is ``EMPTY``. No flag and
no barrier is needed. The thread that has received a word writes ``EMPTY`` back. (TensorRT-LLM's "Lamport" kernels are
built on the same idea, with three buffers for a whole message.)

Why two slots are enough: a peer writes to a slot again two uses later. It does so in a kernel that starts after its
previous use has ended, and that use needed what this rank sends in the use after the one that emptied the slot. Each
use of a channel is therefore in a different kernel, and kernels of all ranks run in the same order. The number of uses
of each channel is counted on the device, because CUDA graphs replay these kernels.

Sums are taken in the order of the ranks, in float32, rounded once, so that all ranks get the same bits. For two ranks
the order does not matter.

Two ranks send the same number of bytes in one shot and in two. More ranks send less in two. A row has a program with
one thread for 16 bytes of it. Fewer threads, and programs that send several rows ahead, were slower at every size.

Programs wait for the programs with the same number on other ranks, and send everything that those wait for first. A
grid that does not fit on a device is correct as long as programs start in the order of their numbers. A wait that takes
longer than a limit traps, which CUDA reports as a launch failure.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.launch import INTERPRETED, launch
from dovetail.ops.triton.peer_rules import MOST_WARPS
from dovetail.ops.triton.peer_words import (
    EMPTY,
    add_words,
    as_float,
    fetch_words,
    high_half,
    low_half,
    pack_words,
    put_words,
    receive_words,
    scaled_words,
    sendable,
    squares,
)
from dovetail.ops.triton.sizes import next_power_of_2

CHUNK = 16
"""The number of bytes that a thread loads or stores at once."""
SLOTS = 2
WARP = 32
"""The number of threads of a warp."""


@triton.jit
def _own(x, row, rows, size, at, inside, PARTS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Return this rank's row, ready to be sent: of DTYPE, or the rounded sum of float32 parts."""
    if PARTS == 0:
        w = fetch_words(x.to(tl.int64) + row * size * 2 + at * 16, inside, ASM)
    else:
        source = x.to(tl.int64) + row * size * 4 + at * 32
        f = fetch_words(source, inside, ASM)
        g = fetch_words(source + 16, inside, ASM)
        a0, a1, a2, a3 = as_float(f[0]), as_float(f[1]), as_float(f[2]), as_float(f[3])
        b0, b1, b2, b3 = as_float(g[0]), as_float(g[1]), as_float(g[2]), as_float(g[3])
        for part in tl.static_range(1, PARTS):
            f = fetch_words(source + part * rows * size * 4, inside, ASM)
            g = fetch_words(source + part * rows * size * 4 + 16, inside, ASM)
            a0, a1, a2, a3 = a0 + as_float(f[0]), a1 + as_float(f[1]), a2 + as_float(f[2]), a3 + as_float(f[3])
            b0, b1, b2, b3 = b0 + as_float(g[0]), b1 + as_float(g[1]), b2 + as_float(g[2]), b3 + as_float(g[3])
        w = (pack_words(a0, a1, DTYPE), pack_words(a2, a3, DTYPE), pack_words(b0, b1, DTYPE), pack_words(b2, b3, DTYPE))
    return sendable(w[0]), sendable(w[1]), sendable(w[2]), sendable(w[3])


@triton.jit
def _sum(own, got, WORD: tl.constexpr, SOURCES: tl.constexpr, DTYPE: tl.constexpr):
    """Return the rounded sum of one word of all ranks, ready to be sent. With one source, the other is ``own``."""
    if SOURCES == 1:
        return sendable(add_words(own, got[WORD], DTYPE))
    else:
        low, high = low_half(got[WORD], DTYPE), high_half(got[WORD], DTYPE)
        for source in tl.static_range(1, SOURCES):
            low += low_half(got[4 * source + WORD], DTYPE)
            high += high_half(got[4 * source + WORD], DTYPE)
        return sendable(pack_words(low, high, DTYPE))


@triton.jit
def _finish(
    s0, s1, s2, s3, r, w, out, total, row, size, at, inside, eps,
    NORM: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr,
) -> None:  # fmt: skip
    """Write the sum; or add the residual ``r``, and write that sum and its norm."""
    here = row * size * 2 + at * 16
    if NORM:
        s0, s1, s2, s3 = (
            add_words(s0, r[0], DTYPE),
            add_words(s1, r[1], DTYPE),
            add_words(s2, r[2], DTYPE),
            add_words(s3, r[3], DTYPE),
        )
    put_words(total.to(tl.int64) + here, (s0, s1, s2, s3), inside, False, ASM)
    if NORM:
        lengths = squares(s0, DTYPE) + squares(s1, DTYPE) + (squares(s2, DTYPE) + squares(s3, DTYPE))
        scale = tl.rsqrt(tl.sum(lengths, 0) / size + eps)
        n0, n1 = scaled_words(s0, scale, w[0], DTYPE), scaled_words(s1, scale, w[1], DTYPE)
        n2, n3 = scaled_words(s2, scale, w[2], DTYPE), scaled_words(s3, scale, w[3], DTYPE)
        put_words(out.to(tl.int64) + here, (n0, n1, n2, n3), inside, False, ASM)


@triton.jit
def _residual(residual, row, size, at, inside, NORM: tl.constexpr, ASM: tl.constexpr):
    """Load a row of the residual. Called before the row is received, so that it is there by then."""
    if NORM:
        return fetch_words(residual.to(tl.int64) + row * size * 2 + at * 16, inside, ASM)
    else:
        return inside, inside, inside, inside


@triton.jit
def _memory(table, other, target, TP: tl.constexpr):
    """Return the address of a rank's memory. With two ranks, it is the other one's, which was loaded before."""
    if TP == 2:
        return other
    else:
        return tl.load(table + target)


@triton.jit
def _send_row(words, table, other, offset, at, inside, TP: tl.constexpr, ASM: tl.constexpr) -> None:
    """Send a row to every rank; with two ranks only to the other one, whose memory is at ``other``."""
    if TP == 2:
        put_words(other + offset + at * 16, words, inside, True, ASM)
    else:
        for target in tl.static_range(TP):
            put_words(tl.load(table + target) + offset + at * 16, words, inside, True, ASM)


@triton.jit(do_not_specialize=["rows", "rank", "limit"])
def _one_shot(
    x, residual, weight, out, total, table, uses, rank, rows, size, channel_bytes, channels, limit, eps,
    TP: tl.constexpr, SOURCES: tl.constexpr, PARTS: tl.constexpr, NORM: tl.constexpr, CHUNKS: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Send a row to all ranks, receive theirs, add up."""
    DTYPE: tl.constexpr = total.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, CHUNKS).to(tl.int64)
    inside = (at * 8 < size).to(tl.int32)
    if PDL:
        gdc_launch_dependents()
    mine, other = tl.load(table + rank), tl.load(table + (rank + 1) % TP)
    w = fetch_words(weight.to(tl.int64) + at * 16, inside, ASM) if NORM else (at, at, at, at)
    if PDL:
        gdc_wait()
    used = tl.load(uses + row, cache_modifier=".cg")
    slot = (used & 1).to(tl.int64) * SOURCES
    own = _own(x, row, rows, size, at, inside, PARTS, DTYPE, ASM)
    source = 0 if SOURCES == 1 else rank
    _send_row(own, table, other, ((slot + source) * channels + row) * channel_bytes, at, inside, TP, ASM)
    r = _residual(residual, row, size, at, inside, NORM, ASM)
    here = mine + (slot * channels + row) * channel_bytes + at * 16
    got = receive_words(here, channels * channel_bytes, limit, inside, SOURCES, ASM)
    s0, s1 = _sum(own[0], got, 0, SOURCES, DTYPE), _sum(own[1], got, 1, SOURCES, DTYPE)
    s2, s3 = _sum(own[2], got, 2, SOURCES, DTYPE), _sum(own[3], got, 3, SOURCES, DTYPE)
    _finish(s0, s1, s2, s3, r, w, out, total, row, size, at, inside, eps, NORM, DTYPE, ASM)
    tl.debug_barrier()  # all threads have read the number of uses
    tl.store(uses + row, used + 1)


@triton.jit(do_not_specialize=["rows", "rank", "limit"])
def _two_shot(
    x, residual, weight, out, total, table, uses, rank, rows, size, channel_bytes, channels, limit, eps,
    TP: tl.constexpr, SOURCES: tl.constexpr, PARTS: tl.constexpr, NORM: tl.constexpr, CHUNKS: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Send every row to the rank that adds it up, row modulo TP, which sends the sum to all ranks. A program has a group
    of TP rows. A channel is a group: first what is added up, SOURCES rows, then the sums, TP rows."""
    DTYPE: tl.constexpr = total.dtype.element_ty
    group = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, CHUNKS).to(tl.int64)
    inside = (at * 8 < size).to(tl.int32)
    if PDL:
        gdc_launch_dependents()
    mine, other = tl.load(table + rank), tl.load(table + (rank + 1) % TP)
    w = fetch_words(weight.to(tl.int64) + at * 16, inside, ASM) if NORM else (at, at, at, at)
    source = 0 if SOURCES == 1 else rank
    if PDL:
        gdc_wait()
    used = tl.load(uses + group, cache_modifier=".cg")
    here = ((used & 1).to(tl.int64) * channels + group) * (SOURCES + TP) * channel_bytes + at * 16
    sums = here + SOURCES * channel_bytes
    for owner in tl.static_range(TP):
        if (group * TP + owner < rows) & ((SOURCES > 1) | (owner != rank)):
            words = _own(x, group * TP + owner, rows, size, at, inside, PARTS, DTYPE, ASM)
            put_words(_memory(table, other, owner, TP) + here + source * channel_bytes, words, inside, True, ASM)
    row = group * TP + rank
    if row < rows:
        own = _own(x, row, rows, size, at, inside, PARTS, DTYPE, ASM)
        r = _residual(residual, row, size, at, inside, NORM, ASM)
        got = receive_words(mine + here, channel_bytes, limit, inside, SOURCES, ASM)
        s0, s1 = _sum(own[0], got, 0, SOURCES, DTYPE), _sum(own[1], got, 1, SOURCES, DTYPE)
        s2, s3 = _sum(own[2], got, 2, SOURCES, DTYPE), _sum(own[3], got, 3, SOURCES, DTYPE)
        for target in tl.static_range(TP):
            if target != rank:
                put_words(
                    _memory(table, other, target, TP) + sums + rank * channel_bytes,
                    (s0, s1, s2, s3),
                    inside,
                    True,
                    ASM,
                )
        _finish(s0, s1, s2, s3, r, w, out, total, row, size, at, inside, eps, NORM, DTYPE, ASM)
    for owner in tl.static_range(TP):
        if (group * TP + owner < rows) & (owner != rank):
            r = _residual(residual, group * TP + owner, size, at, inside, NORM, ASM)
            got = receive_words(mine + sums + owner * channel_bytes, 0, limit, inside, 1, ASM)
            _finish(
                got[0], got[1], got[2], got[3], r, w, out, total, group * TP + owner, size, at, inside, eps,
                NORM, DTYPE, ASM,
            )  # fmt: skip
    tl.debug_barrier()
    tl.store(uses + group, used + 1)


@triton.jit(do_not_specialize=["rank", "limit"])
def _gather(
    x, out, table, uses, rank, row_bytes, x_stride, out_bytes, channels, limit,
    TP: tl.constexpr, CHUNKS: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Send a block of a row to all other ranks and write the blocks of all ranks side by side. Rows of the result may
    leave out the end of the last rank's."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    channel = row * tl.num_programs(1) + block
    at = tl.arange(0, CHUNKS).to(tl.int64) * 16
    column = block * CHUNKS * 16 + at
    inside = (column < row_bytes).to(tl.int32)
    if PDL:
        gdc_launch_dependents()
    mine = tl.load(table + rank)
    if PDL:
        gdc_wait()
    used = tl.load(uses + channel, cache_modifier=".cg")
    here = ((used & 1).to(tl.int64) * channels + channel) * TP * CHUNKS * 16 + at
    w = fetch_words(x.to(tl.int64) + row * x_stride + column, inside, ASM)
    words = (sendable(w[0]), sendable(w[1]), sendable(w[2]), sendable(w[3]))
    for i in tl.static_range(1, TP):
        target = (rank + i) % TP
        put_words(tl.load(table + target) + here + rank * CHUNKS * 16, words, inside, True, ASM)
    result = out.to(tl.int64) + row * out_bytes + column
    put_words(result + rank * row_bytes, words, inside * (column + rank * row_bytes < out_bytes), False, ASM)
    for i in tl.static_range(1, TP):
        source = (rank + i) % TP
        got = receive_words(mine + here + source * CHUNKS * 16, 0, limit, inside, 1, ASM)
        shown = inside * (column + source * row_bytes < out_bytes).to(tl.int32)
        put_words(result + source * row_bytes, (got[0], got[1], got[2], got[3]), shown, False, ASM)
    tl.debug_barrier()
    tl.store(uses + channel, used + 1)


class Channels(NamedTuple):
    """Describe channels that all ranks have alike. ``table`` int64 ``[ranks]`` are the addresses of the memory of each
    rank, ``uses`` int32 ``[count]`` the number of uses of each channel, ``row_bytes`` the most bytes of a row."""

    rank: int
    ranks: int
    table: torch.Tensor
    uses: torch.Tensor
    row_bytes: int

    @property
    def count(self) -> int:
        """Return the number of channels."""
        return len(self.uses)

    @property
    def sources(self) -> int:
        """Return the number of ranks from which this one receives what it adds up. With more than two, it sends to
        itself too, so that the order of the sum is the same everywhere."""
        return 1 if self.ranks == 2 else self.ranks


def empty(memory: torch.Tensor) -> None:
    """Mark all slots of a rank's memory (int32) as empty. No rank may send before all ranks have done this."""
    memory.fill_(EMPTY)


def one_shot_bytes(ranks: int, rows: int, row_bytes: int) -> int:
    """Return the memory of the channels of ``one_shot`` for up to ``rows`` rows."""
    return SLOTS * (1 if ranks == 2 else ranks) * rows * row_bytes


def two_shot_bytes(ranks: int, rows: int, row_bytes: int) -> int:
    """Return the memory of the channels of ``two_shot`` for up to ``rows`` rows."""
    return SLOTS * ((1 if ranks == 2 else ranks) + ranks) * -(-rows // ranks) * row_bytes


def gather_bytes(ranks: int, count: int, chunks: int) -> int:
    """Return the memory of ``count`` channels of ``gather``, with blocks of ``chunks`` times 16 bytes."""
    return SLOTS * ranks * count * chunks * CHUNK


def one_shot(
    channels: Channels,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    limit: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(norm, sum)`` of ``sum = (x of all ranks) + residual``, where every rank sends its rows to all others.

    ``x`` is ``[rows, size]`` of 16 bits, or float32 ``[parts, rows, size]``, which are added up and rounded first. The
    sum of ``x`` is rounded before ``residual [rows, size]`` is added. ``weight`` is ``[size]``. Without them, both
    results are the sum of ``x``, which is then of 16 bits. ``limit`` is the number of clock cycles after which a wait
    fails. The bits of a row of the results do not depend on the number of rows. More rows than there are channels are
    added up one after the other.
    """
    return _add_up(_one_shot, 1, channels, x, residual, weight, eps, limit)


def two_shot(
    channels: Channels,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    limit: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``one_shot``, with the same bits, where every row is added up by one rank, which sends the sum to the
    others. ``channels`` has one channel for each group of ``ranks`` rows."""
    return _add_up(_two_shot, channels.ranks, channels, x, residual, weight, eps, limit)


def _add_up(
    kernel: object,
    group: int,
    channels: Channels,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    limit: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a kernel, whose programs compute ``group`` rows each."""
    like = x if residual is None else residual
    assert x.is_contiguous()
    assert like.is_contiguous()
    assert like.ndim == 2
    assert like.element_size() == 2
    assert weight is None or weight.dtype == like.dtype
    (rows, size), parts = like.shape, len(x) if x.ndim == 3 else 0
    assert x.dtype == (torch.float32 if parts else like.dtype)
    assert 2 * size <= channels.row_bytes
    total = torch.empty_like(like)
    out = total if residual is None else torch.empty_like(like)
    most = group * channels.count
    assert rows <= most or not parts
    chunks = max(WARP, next_power_of_2(size * 2 // CHUNK))
    for start in range(0, rows, most):
        block = slice(start, start + most)
        count = min(most, rows - start)
        launch(
            kernel, (-(-count // group),),
            x if parts else x[block], total if residual is None else residual[block],
            total if weight is None else weight, out[block], total[block],
            channels.table, channels.uses, channels.rank, count, size, channels.row_bytes, channels.count, limit, eps,
            TP=channels.ranks, SOURCES=channels.sources, PARTS=parts, NORM=residual is not None, CHUNKS=chunks,
            ASM=not INTERPRETED, num_warps=warps_of(chunks),
        )  # fmt: skip
    return out, total


def gather(channels: Channels, x: torch.Tensor, width: int, limit: int) -> torch.Tensor:
    """Return the rows of ``x [n, m]`` of all ranks side by side, ``[n, width]``. ``channels.row_bytes`` is the size of
    a block; a row of ``x`` needs ``ceil(m * itemsize / row_bytes)`` channels. More rows than there are channels for are
    gathered one after the other. Negative zeros may become positive."""
    (rows, size), item = x.shape, x.element_size()
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    blocks = -(-size * item // channels.row_bytes)
    most, chunks = channels.count // blocks, channels.row_bytes // CHUNK
    assert most
    for start in range(0, rows, most):
        launch(
            _gather, (min(most, rows - start), blocks),
            x[start:], out[start:], channels.table, channels.uses, channels.rank, size * item, x.stride(0) * item,
            width * item, channels.count, limit,
            TP=channels.ranks, CHUNKS=chunks, ASM=not INTERPRETED, num_warps=warps_of(chunks),
        )  # fmt: skip
    return out


def warps_of(chunks: int) -> int:
    """Return the number of warps of a program that handles ``chunks`` times 16 bytes, at least a warp's: one chunk per
    thread was the fastest for 512 chunks. There are not more threads than chunks: Triton would give several threads the
    same chunk, and after the first of them has emptied the slot, the others would wait for ever."""
    assert chunks >= WARP
    return 1 if INTERPRETED else min(MOST_WARPS, chunks // WARP)
