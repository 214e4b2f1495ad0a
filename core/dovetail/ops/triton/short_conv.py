"""Compute causal convolutions over a few tokens: of prompts, one program for each chunk of a row and block of channels,
and of decode rows, one for each row and block of channels. Those over four tokens have kernels of their own
(``short_conv_few``), decode rows only in 16 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton import short_conv_few as few
from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.short_conv_few import activated, shift
from dovetail.ops.triton.sizes import cdiv, next_power_of_2
from dovetail.ops.triton.ssd import ADVANCED, ROWS, saved_slots

if TYPE_CHECKING:
    from dovetail.interfaces.mixer import ConvActivation
    from dovetail.interfaces.state_rows import StateRows


STEP_WORDS, WARPS = 128, 4
"""The groups of four channels of a program of ``short_conv_few.step``, and the warps of programs of ``short_conv_few``."""


def chunk_channels(chunks: int) -> int:
    """Return the channels of a program of ``short_conv_few.chunks``: the more programs, the fewer chunks there are."""
    return 512 if chunks >= 64 else 256


@triton.jit(do_not_specialize_on_alignment=ADVANCED)
def _advance(
    x, state, slots, starts, counts, channels, x_stride, state_stride,
    BEFORE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + row).to(tl.int64)
    count = tl.load(counts + row)
    if (slot != 0) & (count > 0):
        own = state + slot * state_stride + channel * BEFORE
        shift(x, own, channel, tl.load(starts + row), count, BEFORE, x_stride, channel < channels, BEFORE)


@triton.jit(do_not_specialize_on_alignment=ROWS)
def _chunks(
    x, weight, bias, state, out, slots, indptr, fresh, chunk_rows, chunk_starts, saves, channels, x_stride,
    state_stride, BIAS: tl.constexpr, SILU: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, WRITES: tl.constexpr, SAVES: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The program of a row's first chunk also writes the state, because it is the only one that reads the old one. That of a
    chunk that is saved writes the chunk's last inputs to the slot of ``saves``."""
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    before: tl.constexpr = WIDTH - 1
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    chunk = tl.program_id(0)
    row, start = tl.load(chunk_rows + chunk), tl.load(chunk_starts + chunk)
    begin, end = tl.load(indptr + row), tl.load(indptr + row + 1)
    slot = tl.load(slots + row).to(tl.int64)
    known = tl.where((tl.load(fresh + row) == 0) & (slot != 0), before, 0)  # inputs that the state holds
    own = state + slot * state_stride + channel * before
    step = tl.arange(0, CHUNK)
    at = start + step
    here = x + start.to(tl.int64) * x_stride + channel[None, :]
    tap = tl.arange(0, TAPS)[None, :]
    weights = tl.load(weight + channel[:, None] * WIDTH + tap, inside[:, None] & (tap < WIDTH), 0.0).to(tl.float32)
    total = tl.zeros([CHUNK, BLOCK], tl.float32)
    if BIAS:
        total += tl.load(bias + channel, inside, 0.0).to(tl.float32)[None, :]
    for i in tl.static_range(WIDTH):
        source = at - before + i
        real = ((source >= begin) & (source < end))[:, None] & inside[None, :]
        addend = tl.load(here + (step - before + i)[:, None] * x_stride, real, 0.0).to(tl.float32)
        total += addend * tl.sum(tl.where(tap == i, weights, 0.0), 1)[None, :]
    if (start == begin) & (known > 0):
        for i in tl.static_range(before):
            kept = tl.load(own[None, :] + (step + i)[:, None], (step + i < before)[:, None] & inside[None, :], 0.0)
            total += kept.to(tl.float32) * tl.sum(tl.where(tap == i, weights, 0.0), 1)[None, :]
    token = out + start.to(tl.int64) * channels + channel[None, :] + step[:, None] * channels
    tl.store(token, activated(total, SILU).to(out.dtype.element_ty), (at < end)[:, None] & inside[None, :])
    if SAVES:
        target = tl.load(saves + chunk).to(tl.int64)
        if target != 0:
            for i in tl.static_range(before):
                last = tl.load(here + (CHUNK - before + i) * x_stride, inside[None, :], 0.0)
                place = state + target * state_stride + channel[None, :] * before + i
                tl.store(place, last.to(state.dtype.element_ty), inside[None, :])
    if WRITES:  # noqa: SIM102 a constant
        if (start == begin) & (slot != 0):
            shift(x, own, channel, begin, end - begin, known, x_stride, inside, before)


@triton.jit(do_not_specialize_on_alignment=ROWS)
def _step(
    x, weight, bias, state, out, slots, channels, x_stride, state_stride,
    BIAS: tl.constexpr, SILU: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    before: tl.constexpr = WIDTH - 1
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + row).to(tl.int64)
    own = state + slot * state_stride + channel * before
    real = inside & (slot + tl.zeros_like(channel) != 0)
    last = tl.load(x + row * x_stride + channel, inside, 0.0)
    total = last.to(tl.float32) * tl.load(weight + channel * WIDTH + before, inside, 0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias + channel, inside, 0.0).to(tl.float32)
    for i in tl.static_range(before):
        kept = tl.load(own + i, real, 0.0)
        total += kept.to(tl.float32) * tl.load(weight + channel * WIDTH + i, inside, 0.0).to(tl.float32)
        if i > 0:
            tl.store(own + i - 1, kept, real)
    tl.store(own + before - 1, last.to(state.dtype.element_ty), real)
    tl.store(out + row * channels + channel, activated(total, SILU).to(out.dtype.element_ty), inside)


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    rows: StateRows,
    activation: ConvActivation = "silu",
) -> torch.Tensor:
    """Compute ``ops.short_conv.short_conv``."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _check(x, weight, state)
    if len(x) and weight.shape[1] == few.WIDTH:
        block = chunk_channels(len(rows.chunk_rows))
        launch(
            few.chunks, (cdiv(x.shape[1], block), len(rows.chunk_rows)),
            x, weight, bias, state, out, rows.slots, rows.indptr, rows.fresh, rows.chunk_rows, rows.chunk_starts,
            saved_slots(rows), x.shape[1], x.stride(0), state.stride(0),
            BIAS=bias is not None, SILU=activation == "silu", CHUNK=rows.chunk, BLOCK=block,
            WRITES=rows.writes, SAVES=rows.saves is not None, num_warps=WARPS,
        )  # fmt: skip
    elif len(x):
        launch(
            _chunks, (len(rows.chunk_rows), cdiv(x.shape[1], 64)),
            x, weight, bias, state, out, rows.slots, rows.indptr, rows.fresh, rows.chunk_rows, rows.chunk_starts,
            saved_slots(rows), x.shape[1], x.stride(0), state.stride(0),
            BIAS=bias is not None, SILU=activation == "silu", WIDTH=weight.shape[1],
            TAPS=next_power_of_2(weight.shape[1]), CHUNK=rows.chunk, BLOCK=64, WRITES=rows.writes,
            SAVES=rows.saves is not None, num_warps=8,
        )  # fmt: skip
    return out


def short_conv_step(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    slots: torch.Tensor,
    activation: ConvActivation = "silu",
) -> torch.Tensor:
    """Compute ``ops.short_conv.short_conv_step``."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _check(x, weight, state)
    if len(x) and _in_words(x, weight, bias, state):
        words = x.shape[1] // 4
        launch(
            few.step, (cdiv(words, STEP_WORDS), len(x)),
            x, weight, bias, state, out, slots, words, x.stride(0), state.stride(0),
            BIAS=bias is not None, SILU=activation == "silu", BLOCK=STEP_WORDS, num_warps=WARPS,
        )  # fmt: skip
    elif len(x):
        launch(
            _step, (len(x), cdiv(x.shape[1], 512)),
            x, weight, bias, state, out, slots, x.shape[1], x.stride(0), state.stride(0),
            BIAS=bias is not None, SILU=activation == "silu", WIDTH=weight.shape[1], BLOCK=512,
        )  # fmt: skip
    return out


def short_conv_advance(
    x: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor
) -> None:
    """Compute ``ops.short_conv.short_conv_advance``."""
    assert x.stride(1) == 1
    assert state[0].is_contiguous()
    launch(
        _advance, (len(slots), cdiv(x.shape[1], 256)),
        x, state, slots, starts, counts, x.shape[1], x.stride(0), state.stride(0), BEFORE=state.shape[2], BLOCK=256,
    )  # fmt: skip


def _in_words(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor) -> bool:
    """Return whether all that a decode step reads and writes consists of whole words of four numbers."""
    tensors = [x, weight, state, *([] if bias is None else [bias])]
    return (
        weight.shape[1] == few.WIDTH
        and all(each.dtype == x.dtype and each.element_size() == 2 and each.data_ptr() % 8 == 0 for each in tensors)
        and not any(number % 4 for number in (x.shape[1], x.stride(0), state.stride(0)))
    )


def _check(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> None:
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    assert weight.shape[1] > 1
    assert state[0].is_contiguous()
    assert state.shape[1:] == (x.shape[1], weight.shape[1] - 1)
