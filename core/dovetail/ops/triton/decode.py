"""Compute attention of one query per row over a paged pool. The keys of a row are read in several parts at the same
time (flash-decoding).

The query heads that read one key head form one tile, so that each key is read once. The number of parts follows from
the number of rows. Their length follows from ``kv_lens`` on the device, so that a captured launch serves any lengths.
Rows start in their order, with all heads of each: if the longest come first, no long row remains when the others have
ended.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.halves import are_pairs, half_pairs, half_queries
from dovetail.ops.triton.launch import launch, processors
from dovetail.ops.triton.pages import layout
from dovetail.ops.triton.sizes import cdiv, next_power_of_2

LOG2_E = 1.4426950408889634
MAX_SPLITS, MAX_LONG_SPLITS = 32, 128  # one program merges all parts of a head
LEAST_UNIT = 32  # see ``unit_of``
LEAST_TILE = 16  # rows of the smallest tile that tensor cores multiply
LARGE = 256  # values with more elements leave a program no registers for more than LEAST_TILE rows


class DecodeTile(NamedTuple):
    """Describe how a program reads keys: ``keys`` at a time."""

    keys: int
    num_stages: int
    num_warps: int


LARGE_TILE = DecodeTile(128, 2, 4)
"""The tile with the most bytes in flight: one program for each multiprocessor reads at 0.6 of the bandwidth of the
device."""
LARGE_TILE_8_BITS = DecodeTile(128, 5, 4)
"""The same for pools of 8 bits: twice as many keys are in flight (H200, 32 rows of 32,768 keys: 521 us, with ``LARGE_TILE`` 567)."""
LARGE_TILE_RESIDENT = 3
"""The number of programs with either tile that a multiprocessor of Hopper runs at the same time."""
MIDDLE_TILE, SMALL_TILE = DecodeTile(64, 2, 4), DecodeTile(32, 2, 2)
RESIDENT = {LARGE_TILE: LARGE_TILE_RESIDENT, MIDDLE_TILE: 5, SMALL_TILE: 8}
"""The number of programs with each tile that a multiprocessor of Hopper runs at the same time, for keys of ``MEASURED_ROW_BYTES``. The
larger the tile, the faster is a program, and the fewer of them keep the device busy at the end of a step."""
FEW_TILES, MANY_TILES = 4, 10
"""Rows are few if their number times the key heads is at most the first number for each multiprocessor, and many if it is at least
the second."""
MEASURED_ROW_BYTES = 256
"""The bytes of a key of one head, as an operand, for which tiles and numbers of resident programs were measured."""


def is_measured(head_dim: int, value_dim: int, itemsize: int, pool_itemsize: int) -> bool:
    """Return True if ``LARGE_TILE_RESIDENT`` holds: for keys and values of 128 numbers of 16 bits, which are in 16 or in 8 bits in
    the pool. Sizes of numbers are in bytes."""
    return head_dim == value_dim == 128 and itemsize == 2 and pool_itemsize in (1, 2)


@functools.cache
def decode_splits(rows: int, kv_heads: int, processors: int, measured: bool) -> int:
    """Return the number of parts of each row's keys that keeps ``processors`` multiprocessors busy. ``measured``: the number
    of resident programs is known (``is_measured``).

    Programs run in waves of as many as the device runs at the same time. A last wave with few programs would read at a
    fraction of the bandwidth, so the number of parts is the one whose last wave is fullest (H200, 32 rows of 8,192
    keys: 2 parts are read at 82 % of the bandwidth, 3 parts at 97 %).
    """
    tiles, places = rows * kv_heads, LARGE_TILE_RESIDENT * processors
    if tiles > 3 * processors:
        return 1
    most = min(MAX_SPLITS, max(2, 4 * processors // tiles))
    if not measured or 2 * tiles <= processors:
        return most
    return max(range(2, most + 2), key=lambda splits: (_fullness(tiles * splits, places), -splits))


def long_splits(kv_heads: int, processors: int) -> int:
    """Return the number of parts with which the programs of a single row fill the device, if they use ``LARGE_TILE``.
    Few rows of any lengths then fill it too, because all parts of a long row run at the same time."""
    return min(MAX_LONG_SPLITS, max(2, LARGE_TILE_RESIDENT * processors // kv_heads))


def _fullness(programs: int, places: int) -> float:
    """Return the part of the waves' places that programs use."""
    return programs / (-(-programs // places) * places)


@functools.cache
def tiling(
    row_bytes: int, key_bytes: int, tiles: int, processors: int, *, long: bool = False, eight_bits: bool = False
) -> DecodeTile:
    """Return the tile for keys of one head that take ``key_bytes`` in the pool and, as operands of a product or as
    values, at most ``row_bytes``. ``tiles`` is the number of rows times the number of key heads. ``long``: return
    ``LARGE_TILE``, or ``LARGE_TILE_8_BITS``, if ``row_bytes`` allows it. ``eight_bits``: the pool has numbers of 8 bits.

    If there are few tiles, each runs alone on a multiprocessor and reads far ahead. If there are many, several tiles
    share one, and programs run in waves: the tile is the one whose last wave is fullest (``RESIDENT``; H200, 96 rows of 8 key heads:
    65 us with ``LARGE_TILE``, 76 and 71 with the others). If there are very many, rows of different lengths form no waves, and the
    smallest tile is the fastest. If there are very few, they leave shared memory to the next kernel, a
    product that has begun to fetch its weights. With ``long``, contexts are long enough that reading them faster gains more. Measured
    on an H200; the cases of very few and of very many tiles were measured within whole steps.
    """
    if row_bytes > 2048:
        return DecodeTile(16, 1, 4)
    if row_bytes > MEASURED_ROW_BYTES:
        return DecodeTile(32, 2, 4)
    if eight_bits and row_bytes == MEASURED_ROW_BYTES:
        return LARGE_TILE_8_BITS if long or 2 * tiles > processors else DecodeTile(64, 5, 4)
    if long:
        return LARGE_TILE
    if tiles <= FEW_TILES * processors:
        return LARGE_TILE if 2 * tiles > processors else MIDDLE_TILE
    if tiles >= MANY_TILES * processors:
        return SMALL_TILE
    if key_bytes == MEASURED_ROW_BYTES:
        return max(RESIDENT, key=lambda tile: _fullness(tiles, RESIDENT[tile] * processors))
    return MIDDLE_TILE


def unit_of(tile: DecodeTile, splits: int, programs: int, processors: int) -> int:
    """Return the number of which the keys of each of ``splits`` parts are a multiple. If all ``programs`` with ``LARGE_TILE`` run at the same time, parts
    of equal length end at the same time (H200, 16 rows of 600 keys and 8 key heads, 3 parts: a step of an 8B model takes 4.43 ms instead of 4.48).
    Otherwise, and with two parts, whole blocks of ``tile.keys`` keys are faster (24 rows in two parts: 4.72 ms instead of 4.75)."""
    resident = programs <= LARGE_TILE_RESIDENT * processors
    return LEAST_UNIT if tile == LARGE_TILE and splits > 2 and resident else tile.keys


@triton.jit
def _span(length, splits, UNIT: tl.constexpr):
    """Return the keys of a part: a multiple of ``UNIT``, so that short rows use fewer than ``splits`` parts."""
    return tl.cdiv(tl.cdiv(length, splits), UNIT) * UNIT


@triton.jit(
    do_not_specialize=["window", "table_row", "splits", "rows"],
    do_not_specialize_on_alignment=["table", "kv_lens", "sinks"],
)
def _decode(
    q, keys, values, table, kv_lens, sinks, out, lse, parts, scale, soft_cap, window,
    q_row, q_head, table_row, splits, heads, rows,
    PAGE: tl.constexpr, KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, BLOCK_K: tl.constexpr, REST: tl.constexpr,
    BLOCK_REST: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, K_HEAD: tl.constexpr,
    V_HEAD: tl.constexpr, SAME: tl.constexpr, PAIRS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_HEADS: tl.constexpr, HEAD_BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr,
    UNIT: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """With PAIRS, ``values`` are 16-bit integers of two neighbouring numbers of the dtype of ``keys`` each, and products are
    in float16."""
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    kv_head = tl.program_id(0) // HEAD_BLOCKS
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    end = tl.load(kv_lens + row)
    begin = 0
    if WINDOW:
        begin = tl.maximum(end - window, 0)
    if SPLIT:
        span = _span(end - begin, splits, UNIT)
        begin += part * span
        if (begin >= end) & (part > 0):  # the first part also writes the result of a row without keys
            return
        end = tl.minimum(end, begin + span)
    member = tl.program_id(0) % HEAD_BLOCKS * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    head = kv_head * GROUP + member
    at, at_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    real = member < GROUP
    from_q = q + row * q_row + head[:, None] * q_head
    query = tl.load(from_q + at[None, :], real[:, None] & (at < KEY_DIM)[None, :], 0.0)
    query_r = query
    if REST:
        at_r = tl.arange(0, BLOCK_REST)
        query_r = tl.load(from_q + KEY_DIM + at_r[None, :], real[:, None] & (at_r < REST)[None, :], 0.0)
    if PAIRS:
        query, query_r, scale = half_queries(query, query_r, scale, REST)
        at_2 = tl.arange(0, BLOCK_V // 2)
        even = tl.zeros([BLOCK_HEADS, BLOCK_V // 2], tl.float32)
        odd = tl.zeros([BLOCK_HEADS, BLOCK_V // 2], tl.float32)
    else:
        result = tl.zeros([BLOCK_HEADS, BLOCK_V], tl.float32)
    top = tl.full([BLOCK_HEADS], -1e30, tl.float32)  # finite, because padding rows may read NaN
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    for start in range(begin, end, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        there = token < end
        page = tl.load(table + row * table_row + token // PAGE, there, 0)
        place = (page.to(tl.int64) * PAGE + token % PAGE) * KV_HEADS + kv_head
        from_k = keys + (place * K_HEAD)[None, :]
        key = tl.load(from_k + at[:, None], there[None, :] & (at < KEY_DIM)[:, None], 0.0).to(query.dtype)
        score = tl.dot(query, key, input_precision="ieee")
        if REST:
            key_r = tl.load(from_k + KEY_DIM + at_r[:, None], there[None, :] & (at_r < REST)[:, None], 0.0)
            score = tl.dot(query_r, key_r.to(query.dtype), score, input_precision="ieee")
        score *= scale
        if SOFT_CAP:
            score = soft_cap * (1 - 2 / (tl.exp(2 * score / soft_cap) + 1))
        score = tl.where(there[None, :], score * 1.4426950408889634, float("-inf"))
        best = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - best[:, None])
        factor = tl.exp2(top - best)
        if PAIRS:
            from_v = values + (place * (V_HEAD // 2))[:, None] + at_2[None, :]
            pairs = tl.load(from_v, there[:, None] & (at_2 < VALUE_DIM // 2)[None, :], 0)
            value_even, value_odd = half_pairs(pairs, keys.dtype.element_ty)
            even = tl.dot(weight.to(tl.float16), value_even, even * factor[:, None])
            odd = tl.dot(weight.to(tl.float16), value_odd, odd * factor[:, None])
        else:
            if SAME:
                value = tl.trans(key)
            else:
                from_v = values + (place * V_HEAD)[:, None] + at_v[None, :]
                value = tl.load(from_v, there[:, None] & (at_v < VALUE_DIM)[None, :], 0.0).to(query.dtype)
            result = tl.dot(weight.to(query.dtype), value, result * factor[:, None], input_precision="ieee")
        total = total * factor + tl.sum(weight, 1)
        top = best
    if PAIRS:
        result = tl.interleave(even, odd)
    if SINKS:  # noqa: SIM102 (a constant decides whether the code is compiled)
        if part == 0:
            sink = tl.load(sinks + head, real, 0.0) * 1.4426950408889634
            best = tl.maximum(top, sink)
            factor = tl.exp2(top - best)
            result = result * factor[:, None]
            total = total * factor + tl.exp2(sink - best)
            top = best
    seen = total > 0
    result = result / tl.where(seen, total, 1.0)[:, None]
    log_sum = tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), float("-inf")) / 1.4426950408889634
    inside = real[:, None] & (at_v < VALUE_DIM)[None, :]
    if SPLIT:
        place = (row * heads + head) * splits + part
        tl.store(parts + place[:, None] * VALUE_DIM + at_v[None, :], result, inside)
        tl.store(lse + place, log_sum, real)
    else:
        to = out + (row * heads + head)[:, None] * VALUE_DIM + at_v[None, :]
        tl.store(to, result.to(out.dtype.element_ty), inside)
        tl.store(lse + head * rows + row, log_sum, real)


@triton.jit(do_not_specialize=["window", "splits", "rows"], do_not_specialize_on_alignment=["kv_lens"])
def _combine(
    parts, part_lse, out, lse, kv_lens, window, splits, heads, rows,
    WINDOW: tl.constexpr, UNIT: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    length = tl.load(kv_lens + row)
    if WINDOW:
        length = tl.minimum(length, window)
    used = tl.maximum(tl.cdiv(length, tl.maximum(_span(length, splits, UNIT), 1)), 1)
    part, at = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BLOCK_V)
    place = (row * heads + head) * splits + part
    logs = tl.load(part_lse + place, part < used, float("-inf"))
    top = tl.maximum(tl.max(logs, 0), -1e30)  # finite even if no part has a key
    weight = tl.exp(logs - top)
    total = tl.sum(weight, 0)
    inside = (weight > 0)[:, None] & (at < VALUE_DIM)[None, :]
    result = tl.sum(tl.load(parts + place[:, None] * VALUE_DIM + at[None, :], inside, 0.0) * weight[:, None], 0)
    seen = total > 0
    result = result / tl.where(seen, total, 1.0)
    tl.store(out + (row * heads + head) * VALUE_DIM + at, result.to(out.dtype.element_ty), at < VALUE_DIM)
    tl.store(lse + head * rows + row, tl.where(seen, top + tl.log(tl.where(seen, total, 1.0)), float("-inf")))


def paged_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    *,
    splits: int,
    long: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with ``q [rows, heads, d]``. Row r sees the last ``window`` of its ``kv_lens[r]`` (int32) keys, which are
    in the pages ``table[r]`` (int32 ``[rows, >= pages]``) of ``keys [pages, page_size, kv_heads, d]`` and ``values``.
    The d of ``values`` may differ, and ``values`` may be a view of the keys (see ``pages.layout``). For ``soft_cap``
    and ``sinks`` see ``AttentionLayer``. Keys are read in up to ``splits`` parts, with ``long`` by the tile that reads
    farthest ahead (see ``tiling``).

    Return the output ``[rows, heads, d of values]`` and the log-sum-exp, float32 ``[heads, rows]``. For a row without a
    key, the output is 0 and the log-sum-exp -inf.
    """
    rows, heads, size = q.shape
    kv_heads, v_size = values.shape[2:]
    group = heads // kv_heads
    assert q.stride(2) == 1
    assert table.stride(1) == 1
    found = layout(keys, values)
    out = torch.empty(rows, heads, v_size, dtype=q.dtype, device=q.device)
    lse = torch.empty(heads, rows, dtype=torch.float32, device=q.device)
    parts, part_lse = out, lse
    if splits > 1:
        parts = torch.empty(rows, heads, splits, v_size, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(rows, heads, splits, dtype=torch.float32, device=q.device)
    block_heads = LEAST_TILE if v_size > LARGE else max(LEAST_TILE, next_power_of_2(group))
    head_blocks = cdiv(group, block_heads)
    row_bytes, key_bytes = q.element_size() * max(size, v_size), keys.element_size() * size
    eight_bits = keys.element_size() == 1
    tile = tiling(row_bytes, key_bytes, rows * kv_heads, processors(q.device), long=long, eight_bits=eight_bits)
    programs = kv_heads * head_blocks * rows * splits
    unit = tile.keys if long else unit_of(tile, splits, programs, processors(q.device))
    pairs = eight_bits and q.element_size() == 2 and not found["SAME"] and are_pairs(values, found["V_HEAD"])
    launch(
        _decode, (kv_heads * head_blocks, rows, splits),
        q, keys, values.view(torch.int16) if pairs else values, table, kv_lens, sinks, out, part_lse, parts, scale, soft_cap or 0.0, window or 0,
        q.stride(0), q.stride(1), table.stride(0), splits, heads, rows,
        **found, PAIRS=pairs, GROUP=group, BLOCK_HEADS=block_heads, HEAD_BLOCKS=head_blocks, BLOCK_N=tile.keys, UNIT=unit, WINDOW=window is not None, SOFT_CAP=soft_cap is not None,
        SINKS=sinks is not None, SPLIT=splits > 1, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if splits > 1:
        block_splits = next_power_of_2(splits)
        launch(
            _combine, (rows, heads), parts, part_lse, out, lse, kv_lens, window or 0, splits, heads, rows,
            WINDOW=window is not None, UNIT=unit, VALUE_DIM=v_size, BLOCK_V=found["BLOCK_V"],
            BLOCK_SPLITS=block_splits, num_warps=1 if block_splits < 16 else 4,
        )  # fmt: skip
    return out, lse
