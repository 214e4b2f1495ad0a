"""Compute attention of few rows with one token each from their projection: normalise and rotate queries and keys, write keys and values
to a paged pool, and attend, in one kernel, and merge what its programs find in a second one.

For each row and key head, one program attends to the token's own key and value, which it takes from the projection. The others read the
keys of earlier steps in parts, and load their first keys and values before they wait for the projection.
Lengths, page tables and the places of tokens are read early too, unless the kernel leads (see ``launch``).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.interfaces.attention import ProjectedRows
from dovetail.ops.triton.decode import LEAST_TILE, LOG2_E
from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.sizes import next_power_of_2


class ProjectedTile(NamedTuple):
    """Describe how the keys of a row are read: in up to ``splits`` parts, of which the first is the token itself. A program reads
    ``keys`` keys before it waits, and ``more_keys`` at a time afterwards. The keys of a part are a multiple of ``unit``, so that short rows
    have fewer parts. A program of the second kernel merges ``width`` elements of a head."""

    splits: int
    keys: int
    more_keys: int
    num_warps: int
    num_stages: int
    unit: int
    width: int = 32


MOST_TILES = 32
"""The largest number of rows times key heads for which these kernels are used. With 64, steps of an 8B model take 1 to 4 % less, but those of Qwen3-0.6B
5 % and those of Qwen3-30B-A3B 1 % longer than with one kernel after another (H200)."""


@functools.cache
def tile_of(tiles: int, group: int) -> ProjectedTile:
    """Return the tile for ``tiles`` rows times key heads, up to ``MOST_TILES``, each of which ``group`` query heads read. Measured on an
    H200 in steps of models, with 600 keys of 128 numbers for each row."""
    if tiles <= 4 or (tiles <= 8 and group < 4):
        return ProjectedTile(32, 32, 64, 8, 2, unit=32)
    if tiles <= 8:
        return ProjectedTile(32, 64, 64, 8, 2, unit=64)
    if tiles <= 16:
        return ProjectedTile(12, 64, 64, 4, 2, unit=64)
    return ProjectedTile(7, 128, 128, 4, 2, unit=32, width=64)


@triton.jit
def _factors(angles, norm, at, other, SIZE: tl.constexpr, NORM: tl.constexpr):
    """Return by what an element, and the ``other`` one of its pair, are multiplied: ``[1, SIZE]``. Each branch of the kernel loads
    its own, because Triton 3.6 does not compile a kernel in which branches need the same tensor in several layouts."""
    cos, sin = tl.load(angles), tl.load(angles + SIZE)
    if NORM:
        cos *= tl.load(norm + at).to(tl.float32)
        sin *= tl.load(norm + other).to(tl.float32)
    return cos, sin


@triton.jit
def _turned(source, there, cos, sin, at, other, eps, SIZE: tl.constexpr, NORM: tl.constexpr):
    """Return heads, normalised and rotated, in the dtype of ``source``."""
    x = tl.load(source + at, there, 0.0).to(tl.float32)
    turned = x * cos + tl.load(source + other, there, 0.0).to(tl.float32) * sin
    if NORM:
        turned *= tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None]
    return turned.to(source.dtype.element_ty)


@triton.jit
def _tile(
    keys, values, table, start, end, kv_head,
    PAGE: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Return keys ``[SIZE, KEYS]`` and values ``[KEYS, SIZE]`` from ``start`` on, and 0 from ``end`` on."""
    token, at = start + tl.arange(0, KEYS), tl.arange(0, SIZE)
    there = token < end
    page = tl.load(table + token // PAGE, there, 0, cache_modifier=".cg")
    place = ((page.to(tl.int64) * PAGE + token % PAGE) * KV_HEADS + kv_head) * SIZE
    key = tl.load(keys + place[None, :] + at[:, None], there[None, :], 0.0, cache_modifier=".cg")
    value = tl.load(values + place[:, None] + at[None, :], there[:, None], 0.0, cache_modifier=".cg")
    return key, value


@triton.jit
def _attended(q, key, value, start, end, scale, top, total, result, KEYS: tl.constexpr):
    """Return ``top``, ``total`` and ``result`` after a tile of keys."""
    score = tl.dot(q, key, input_precision="ieee") * scale
    score = tl.where((start + tl.arange(0, KEYS) < end)[None, :], score, float("-inf"))
    best = tl.maximum(top, tl.max(score, 1))
    weight, factor = tl.exp2(score - best[:, None]), tl.exp2(top - best)
    result = tl.dot(weight.to(value.dtype), value, result * factor[:, None], input_precision="ieee")
    return best, total * factor + tl.sum(weight, 1), result


@triton.jit
def _span(before, splits, UNIT: tl.constexpr):
    """Return the keys of a part, if there are keys ``before`` the token."""
    return tl.maximum(tl.cdiv(tl.cdiv(before, splits - 1), UNIT), 1) * UNIT


@triton.jit(
    do_not_specialize=["table_row", "splits"],
    do_not_specialize_on_alignment=["positions", "out_loc", "page_table", "kv_lens"],
)
def _attend_rows(
    qkv, keys, values, table, positions, out_loc, page_table, kv_lens, q_norm, k_norm, parts, part_lse, eps, scale, qkv_row, table_row, splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, UNIT: tl.constexpr, KEYS: tl.constexpr, MORE_KEYS: tl.constexpr, LEADS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    kv_head, part, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        if LEADS:  # in this order, see ``launch``
            gdc_wait()
        gdc_launch_dependents()
    before = tl.load(kv_lens + row, cache_modifier=".cg") - 1
    span = _span(before, splits, UNIT)
    begin = (part - 1) * span
    if begin >= before:
        if PDL:
            gdc_wait()
        return
    at, head = tl.arange(0, SIZE)[None, :], tl.arange(0, BLOCK_HEADS)
    other = (at + SIZE // 2) % SIZE
    angles = table + tl.load(positions + row, cache_modifier=".cg") * 2 * SIZE + at
    group: tl.constexpr = HEADS // KV_HEADS
    source, there = qkv + row * qkv_row + (kv_head * group + head)[:, None] * SIZE, (head < group)[:, None]
    slot = (row * HEADS + kv_head * group + head) * splits + part
    into = parts + slot[:, None] * SIZE + at
    if part == 0:
        cos, sin = _factors(angles, q_norm, at, other, SIZE, NORM)
        k_cos, k_sin = _factors(angles, k_norm, at, other, SIZE, NORM)
        target = (tl.load(out_loc + row, cache_modifier=".cg") * KV_HEADS + kv_head) * SIZE + at + 0 * head[:, None]
        if PDL:
            gdc_wait()
        own = (
            qkv + row * qkv_row + (HEADS + kv_head + 0 * head)[:, None] * SIZE
        )  # the key in each row, so that no warp needs another
        own_value = tl.load(own + KV_HEADS * SIZE + at)
        own_q = _turned(source, there, cos, sin, at, other, eps, SIZE, NORM)
        own_key = _turned(own, head[:, None] >= 0, k_cos, k_sin, at, other, eps, SIZE, NORM)
        tl.store(into, own_value.to(tl.float32), there)
        tl.store(keys + target, own_key, (head == 0)[:, None])
        tl.store(values + target, own_value, (head == 0)[:, None])
        tl.store(part_lse + slot, tl.sum(own_q.to(tl.float32) * own_key.to(tl.float32), 1) * scale, head < group)
    else:
        end = tl.minimum(before, begin + span)
        page_table += row * table_row
        key, value = _tile(keys, values, page_table, begin, end, kv_head, PAGE, KV_HEADS, SIZE, KEYS)
        cos, sin = _factors(angles, q_norm, at, other, SIZE, NORM)
        if PDL:
            gdc_wait()
        q = _turned(source, there, cos, sin, at, other, eps, SIZE, NORM)
        top = tl.full([BLOCK_HEADS], -1e30, tl.float32)
        total = tl.zeros([BLOCK_HEADS], tl.float32)
        result = tl.zeros([BLOCK_HEADS, SIZE], tl.float32)
        top, total, result = _attended(q, key, value, begin, end, scale, top, total, result, KEYS)
        for start in range(begin + KEYS, end, MORE_KEYS):
            more_key, more_value = _tile(keys, values, page_table, start, end, kv_head, PAGE, KV_HEADS, SIZE, MORE_KEYS)
            top, total, result = _attended(q, more_key, more_value, start, end, scale, top, total, result, MORE_KEYS)
        tl.store(into, result / total[:, None], there)
        tl.store(part_lse + slot, top + tl.log2(total), head < group)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["kv_lens"])
def _merge_rows(
    parts, part_lse, out, kv_lens, splits,
    SIZE: tl.constexpr, BLOCK_SPLITS: tl.constexpr, UNIT: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    head, at, part = tl.program_id(0), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH), tl.arange(0, BLOCK_SPLITS)
    row = tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
    before = tl.load(kv_lens + row, cache_modifier=".cg") - 1  # early: the kernel before leads, or one before that did
    used = part <= tl.cdiv(before, _span(before, splits, UNIT))
    head += row * tl.num_programs(0)
    slot = head * splits + part
    if PDL:
        gdc_wait()
    logs = tl.load(part_lse + slot, used, float("-inf"))
    found = tl.load(parts + slot[:, None] * SIZE + at[None, :], used[:, None], 0.0)
    weight = tl.exp2(logs - tl.max(logs, 0))
    merged = tl.sum(found * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + head * SIZE + at, merged.to(out.dtype.element_ty))


def fits(heads: int, kv_heads: int, size: int) -> bool:
    """Return True if the kernels attend with this number of heads of this size."""
    return heads // kv_heads <= LEAST_TILE and size in (64, 128)


def attend_rows(
    rows: ProjectedRows, keys: torch.Tensor, values: torch.Tensor, page_table: torch.Tensor, kv_lens: torch.Tensor,
    scale: float, *, leads: bool,
) -> torch.Tensor:  # fmt: skip
    """Return the attention output ``[rows, heads, d]`` of the tokens of ``rows``, after writing their keys and values. Row r sees the
    ``kv_lens[r]`` (int32, at least 1) keys of the pages ``page_table[r]`` (int32) of ``keys [pages, page_size, kv_heads, d]`` and
    ``values``, the last of which is its own. Both are contiguous and have the dtype of the projection, and ``fits`` holds. There are at
    most ``MOST_TILES`` rows times key heads.

    ``leads``: nothing that earlier kernels of the step write is read early.
    """
    kv_heads, size = keys.shape[2:]
    count, heads = rows.qkv.shape[0], rows.qkv.shape[1] - 2 * kv_heads
    assert rows.qkv.stride()[1:] == (size, 1)
    assert keys.is_contiguous()
    assert values.is_contiguous()
    tile, device = tile_of(count * kv_heads, heads // kv_heads), rows.qkv.device
    out = torch.empty(count, heads, size, dtype=rows.qkv.dtype, device=device)
    parts = torch.empty(count, heads, tile.splits, size, dtype=torch.float32, device=device)
    part_lse = torch.empty(count, heads, tile.splits, dtype=torch.float32, device=device)
    q_norm, k_norm, eps = rows.norm or (None, None, 0.0)
    launch(
        _attend_rows, (kv_heads, tile.splits, count),
        rows.qkv, keys, values, rows.table, rows.positions, rows.out_loc, page_table, kv_lens, q_norm, k_norm, parts, part_lse, eps, scale * LOG2_E,
        rows.qkv.stride(0), page_table.stride(0), tile.splits,
        HEADS=heads, KV_HEADS=kv_heads, SIZE=size, PAGE=keys.shape[1], NORM=rows.norm is not None,
        BLOCK_HEADS=LEAST_TILE, UNIT=tile.unit, KEYS=tile.keys, MORE_KEYS=tile.more_keys, LEADS=leads, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    launch(
        _merge_rows, (heads, size // tile.width, count), parts, part_lse, out, kv_lens, tile.splits,
        SIZE=size, BLOCK_SPLITS=next_power_of_2(tile.splits), UNIT=tile.unit, WIDTH=tile.width, num_warps=1,
    )  # fmt: skip
    return out
