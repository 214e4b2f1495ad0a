"""Compute the gated delta rule.

Prompts take three kernels: those of ``delta_chunks``, or of ``kda_chunks`` if there is a decay for each key channel. Decode
rows take one kernel (``delta_steps``), which reads and writes each state once. Programs hold whole keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton import delta_chunks, delta_steps, kda_chunks
from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.sizes import cdiv, next_power_of_2
from dovetail.ops.triton.ssd import ADVANCED, STATE_DTYPES, saved_slots, softplus

if TYPE_CHECKING:
    from dovetail.interfaces.mixer_shapes import DeltaGates, DeltaShape
    from dovetail.interfaces.state_rows import StateRows

_SUB = 16
LEAST_COLUMNS = 64
"""The least columns of values of 16 bits in tiles of ``solve`` and ``outputs`` of ``delta_chunks``, and of ``kda_chunks.outputs``. With
fewer, the assembler of CUDA 12.8 (Triton 3.6) makes code for small heads that computes addresses of tiles from a register that nothing has written."""


class DeltaTiles(NamedTuple):
    """Hold how the kernels of ``delta_chunks`` are launched: their numbers of warps and stages, and how many value channels
    are a program of ``pass_states``."""

    solve_warps: int
    pass_columns: int
    pass_warps: int
    pass_stages: int
    output_warps: int
    output_columns: int


TILES = DeltaTiles(4, 32, 4, 3, 4, 128)
EXACT_TILES = DeltaTiles(8, 32, 8, 2, 8, 64)
"""The tiles for inputs in float32, whose products are computed from three each."""


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
        S *= tl.exp(speed * softplus(x + tl.load(bias + head * KEY + channel, key, 0.0)))[:, None]
    else:
        S *= tl.exp(speed * softplus(tl.load(a + head).to(tl.float32) + tl.load(bias + head)))
    change = (v - tl.sum(S * k[:, None], 0)) * beta
    return S + k[:, None] * change[None, :]


@triton.jit(do_not_specialize_on_alignment=ADVANCED)
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
        S = tl.load(own, key[:, None] & real[None, :], 0.0).to(tl.float32)
        key_width = heads // GROUP * KEY
        for index in range(count):
            token = first + index
            S = _changed(
                S, qkv + token * qkv_stride + key_width, a + token * a_stride, b + token * b_stride, rate, bias, head,
                channel, place, key, real, key_width, GROUP, KEY, VALUE, BY_CHANNEL,
            )  # fmt: skip
        tl.store(own, S, key[:, None] & real[None, :])


def gated_delta(
    qkv: torch.Tensor, gates: DeltaGates, state: torch.Tensor, rows: StateRows, shape: DeltaShape
) -> torch.Tensor:
    """Compute ``ops.gated_delta.gated_delta``."""
    heads, _, value_dim = shape.state
    out = torch.empty(len(qkv), heads, value_dim, dtype=qkv.dtype, device=qkv.device)
    chunks = len(rows.chunk_rows)
    if not chunks:
        return out
    _check(qkv, gates, state, shape)
    assert rows.chunk in (_SUB, 2 * _SUB, 4 * _SUB)
    (_by_channel if gates.by_channel else _by_head)(qkv, gates, state, rows, shape, out)
    return out


def _by_head(
    qkv: torch.Tensor, gates: DeltaGates, state: torch.Tensor, rows: StateRows, shape: DeltaShape, out: torch.Tensor
) -> None:
    heads, key_dim, value_dim = shape.state
    tokens, chunks, exact = len(qkv), len(rows.chunk_rows), qkv.dtype == torch.float32
    totals, fades = torch.empty(2, tokens, heads, dtype=torch.float32, device=qkv.device)
    decays = torch.empty(chunks, heads, dtype=torch.float32, device=qkv.device)
    reads = torch.empty(tokens, heads, key_dim, dtype=qkv.dtype, device=qkv.device)
    changes = torch.empty_like(out)
    before = torch.empty(chunks, heads, key_dim, value_dim, dtype=qkv.dtype, device=qkv.device)
    bounds = rows.indptr, rows.chunk_rows, rows.chunk_starts
    tiles = EXACT_TILES if exact and min(key_dim, value_dim) > 16 else TILES
    constants = delta_steps.kernel_sizes(shape) | {"CHUNK": rows.chunk, "PRECISION": "tf32x3" if exact else "tf32"}
    launch(
        delta_chunks.solve, (heads, chunks),
        qkv, gates.a, gates.b, gates.rate, gates.bias, totals, fades, decays, reads, changes, *bounds,
        qkv.stride(0), gates.a.stride(0), gates.b.stride(0), heads,
        **constants, DOUBLINGS=_doublings(rows.chunk), BLOCK_V=_block(value_dim, 128, _least(qkv)),
        num_warps=tiles.solve_warps, num_stages=2,
    )  # fmt: skip
    narrow = _block(value_dim, tiles.pass_columns)
    launch(
        delta_chunks.pass_states, (cdiv(value_dim, narrow), heads, len(rows.lens)),
        qkv, fades, decays, reads, changes, before, state, rows.slots, rows.indptr, rows.fresh, rows.first_chunks,
        saved_slots(rows), qkv.stride(0), state.stride(0), heads,
        **constants, BLOCK_V=narrow, WRITES=rows.writes, SAVES=rows.saves is not None, num_warps=tiles.pass_warps, num_stages=tiles.pass_stages,
    )  # fmt: skip
    launch(
        delta_chunks.outputs, (heads, chunks),
        qkv, totals, changes, before, out, *bounds, qkv.stride(0), heads, key_dim**-0.5,
        **constants, BLOCK_V=_block(value_dim, tiles.output_columns, _least(qkv)), num_warps=tiles.output_warps, num_stages=2,
    )  # fmt: skip


def _by_channel(
    qkv: torch.Tensor, gates: DeltaGates, state: torch.Tensor, rows: StateRows, shape: DeltaShape, out: torch.Tensor
) -> None:
    heads, key_dim, value_dim = shape.state
    tokens, chunks = len(qkv), len(rows.chunk_rows)
    totals = torch.empty(gates.a.shape, dtype=torch.float32, device=qkv.device)
    reads = torch.empty(tokens, heads, key_dim, dtype=qkv.dtype, device=qkv.device)
    changes = torch.empty_like(out)
    before = torch.empty(chunks, heads, key_dim, value_dim, dtype=qkv.dtype, device=qkv.device)
    bounds = rows.indptr, rows.chunk_rows, rows.chunk_starts
    precision = "tf32x3" if qkv.dtype == torch.float32 else "tf32"
    constants = delta_steps.kernel_sizes(shape) | {"CHUNK": rows.chunk, "PRECISION": precision}
    block_v = _block(value_dim, 64)
    # in tiles of 16 columns, Triton 3.6 lets 8 warps read beyond the shared memory of a program
    warps = 8 if min(key_dim, value_dim) > 16 else 4
    launch(
        kda_chunks.solve, (chunks, heads),
        qkv, gates.a, gates.b, gates.rate, gates.bias, totals, reads, changes, *bounds,
        qkv.stride(0), gates.a.stride(0), gates.b.stride(0), heads,
        **constants, SUB=_SUB, DOUBLINGS=_doublings(rows.chunk), BLOCK_V=block_v, num_warps=warps,
    )  # fmt: skip
    narrow = _block(value_dim, 32)
    launch(
        kda_chunks.pass_states, (cdiv(value_dim, narrow), heads, len(rows.lens)),
        qkv, totals, reads, changes, before, state, rows.slots, rows.indptr, rows.fresh, rows.first_chunks,
        rows.chunk_starts, saved_slots(rows), qkv.stride(0), state.stride(0), heads,
        **constants, BLOCK_V=narrow, WRITES=rows.writes, SAVES=rows.saves is not None, num_stages=2,
    )  # fmt: skip
    block_v = _block(value_dim, 64, _least(qkv))
    launch(
        kda_chunks.outputs, (chunks, heads, cdiv(value_dim, block_v)),
        qkv, totals, changes, before, out, *bounds, qkv.stride(0), heads, key_dim**-0.5,
        **constants, SUB=_SUB, BLOCK_V=block_v, num_warps=8,
    )  # fmt: skip


def gated_delta_step(
    qkv: torch.Tensor, gates: DeltaGates, state: torch.Tensor, slots: torch.Tensor, shape: DeltaShape
) -> torch.Tensor:
    """Compute ``ops.gated_delta.gated_delta_step``."""
    if not len(qkv):
        return torch.empty(0, shape.value_heads, shape.value_dim, dtype=qkv.dtype, device=qkv.device)
    _check(qkv, gates, state, shape)
    return delta_steps.step(qkv, gates, state, slots, shape)


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
        _advance, (cdiv(value_dim, block_v), heads, len(slots)),
        qkv, gates.a, gates.b, gates.rate, gates.bias, state, slots, starts, counts, qkv.stride(0), gates.a.stride(0),
        gates.b.stride(0), state.stride(0), heads,
        **_constants(shape, gates), BLOCK_V=block_v,
    )  # fmt: skip


def _block(size: int, limit: int, least: int = 16) -> int:
    return min(limit, max(least, next_power_of_2(size)))


def _least(qkv: torch.Tensor) -> int:
    return 16 if qkv.dtype == torch.float32 else LEAST_COLUMNS


def _doublings(chunk: int) -> int:
    return chunk.bit_length() - 2


def _constants(shape: DeltaShape, gates: DeltaGates) -> dict[str, Any]:
    return delta_steps.kernel_sizes(shape) | {"BY_CHANNEL": gates.by_channel}


def _check(qkv: torch.Tensor, gates: DeltaGates, state: torch.Tensor, shape: DeltaShape) -> None:
    assert qkv.stride(1) == gates.b.stride(1) == gates.a.stride(-1) == 1
    assert gates.a.ndim == 2 or gates.a.stride(1) == shape.key_dim
    assert gates.rate.dtype == gates.bias.dtype == torch.float32
    assert state.dtype in STATE_DTYPES
    assert gates.bias.is_contiguous()
    assert state[0].is_contiguous()
    assert state.shape[1:] == shape.state
