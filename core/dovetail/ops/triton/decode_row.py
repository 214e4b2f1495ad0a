"""Compute attention of one token, the only one of a step, from its projection: normalise and rotate its queries and its key,
write key and value to a paged pool, and attend, in one kernel, and merge what its programs find in a second one.

The programs of a key head read the keys in parts, as those of ``decode`` do. Before they wait for the projection, they load
their first keys and values, which earlier steps have written; the key and the value of the token itself they take from the
projection. Lengths, page tables and the place of the token are read early too, unless the kernel leads (see ``launch``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.interfaces.attention import ProjectedRow
from dovetail.ops.triton.decode import LEAST_TILE, LOG2_E
from dovetail.ops.triton.launch import launch

SPLITS = 32
"""The largest number of parts."""
KEYS = 32
"""The keys that a program reads before it waits, and the unit of parts. With 64, a step of one row and 600 keys took longer (H200)."""
MORE_KEYS = 64
"""The keys that a program reads at a time afterwards."""
WARPS, STAGES = 8, 2
WIDTH = 32
"""The elements of a head that a program merges."""


@triton.jit
def _turned(source, there, norm, at, cos, sin, eps, SIZE: tl.constexpr, NORM: tl.constexpr):
    """Return both halves of heads, normalised and rotated, in the dtype of ``source``. ``at`` is ``[1, SIZE / 2]``."""
    half: tl.constexpr = SIZE // 2
    low = tl.load(source + at, there, 0.0).to(tl.float32)
    high = tl.load(source + half + at, there, 0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / SIZE + eps)[:, None]
        low *= scale * tl.load(norm + at).to(tl.float32)
        high *= scale * tl.load(norm + half + at).to(tl.float32)
    kind: tl.constexpr = source.dtype.element_ty
    return (low * cos - high * sin).to(kind), (high * cos + low * sin).to(kind)


@triton.jit
def _tile(
    keys, values, table, start, end, kv_head,
    PAGE: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Return both halves ``[SIZE / 2, KEYS]`` of keys, and values ``[KEYS, SIZE]``, from ``start`` on, and 0 from ``end`` on."""
    token, at, at_v = start + tl.arange(0, KEYS), tl.arange(0, SIZE // 2), tl.arange(0, SIZE)
    there = token < end
    page = tl.load(table + token // PAGE, there, 0, cache_modifier=".cg")
    place = ((page.to(tl.int64) * PAGE + token % PAGE) * KV_HEADS + kv_head) * SIZE
    source = keys + place[None, :] + at[:, None]
    low = tl.load(source, there[None, :], 0.0, cache_modifier=".cg")
    high = tl.load(source + SIZE // 2, there[None, :], 0.0, cache_modifier=".cg")
    value = tl.load(values + place[:, None] + at_v[None, :], there[:, None], 0.0, cache_modifier=".cg")
    return low, high, value


@triton.jit
def _attended(q_low, q_high, k_low, k_high, value, start, end, scale, top, total, result, KEYS: tl.constexpr):
    """Return ``top``, ``total`` and ``result`` after a tile of keys."""
    score = tl.dot(q_low, k_low, input_precision="ieee")
    score = tl.dot(q_high, k_high, score, input_precision="ieee") * scale
    score = tl.where((start + tl.arange(0, KEYS) < end)[None, :], score, float("-inf"))
    best = tl.maximum(top, tl.max(score, 1))
    weight, factor = tl.exp2(score - best[:, None]), tl.exp2(top - best)
    result = tl.dot(weight.to(value.dtype), value, result * factor[:, None], input_precision="ieee")
    return best, total * factor + tl.sum(weight, 1), result


@triton.jit
def _span(length, SPLITS: tl.constexpr, KEYS: tl.constexpr):
    """Return the keys of a part."""
    return tl.cdiv(tl.cdiv(length, SPLITS), KEYS) * KEYS


@triton.jit(do_not_specialize_on_alignment=["positions", "out_loc", "page_table", "kv_lens"])
def _attend_row(
    qkv, keys, values, table, positions, out_loc, page_table, kv_lens, q_norm, k_norm, parts, part_lse, eps, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, SPLITS: tl.constexpr, KEYS: tl.constexpr, MORE_KEYS: tl.constexpr, LEADS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    kv_head, part = tl.program_id(0), tl.program_id(1)
    half: tl.constexpr = SIZE // 2
    if PDL:
        if LEADS:  # in this order, see ``launch``
            gdc_wait()
        gdc_launch_dependents()
    length = tl.load(kv_lens, cache_modifier=".cg")
    span = _span(length, SPLITS, KEYS)
    begin = part * span
    if begin >= length:
        if PDL:
            gdc_wait()
        return
    end = tl.minimum(length, begin + span)
    written = tl.minimum(end, length - 1)
    k_low, k_high, value = _tile(keys, values, page_table, begin, written, kv_head, PAGE, KV_HEADS, SIZE, KEYS)
    at, at_v, head = tl.arange(0, half)[None, :], tl.arange(0, SIZE), tl.arange(0, BLOCK_HEADS)
    angles = table + tl.load(positions, cache_modifier=".cg") * 2 * SIZE + half + at
    cos, sin = tl.load(angles), tl.load(angles + SIZE)
    place = tl.load(out_loc, cache_modifier=".cg")
    if PDL:
        gdc_wait()
    group: tl.constexpr = HEADS // KV_HEADS
    source = qkv + (kv_head * group + head)[:, None] * SIZE
    q_low, q_high = _turned(source, (head < group)[:, None], q_norm, at, cos, sin, eps, SIZE, NORM)
    top = tl.full([BLOCK_HEADS], -1e30, tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    result = tl.zeros([BLOCK_HEADS, SIZE], tl.float32)
    if end == length:  # the token's own key and value
        one = tl.arange(0, 1)[:, None]
        own = qkv + (HEADS + kv_head) * SIZE + one
        own_low, own_high = _turned(own, one == 0, k_norm, at, cos, sin, eps, SIZE, NORM)
        own_value = tl.load(qkv + (HEADS + KV_HEADS + kv_head) * SIZE + at_v)
        target = (place * KV_HEADS + kv_head) * SIZE
        tl.store(keys + target + one + at, own_low)
        tl.store(keys + target + one + half + at, own_high)
        tl.store(values + target + at_v, own_value)
        product = q_low.to(tl.float32) * own_low.to(tl.float32) + q_high.to(tl.float32) * own_high.to(tl.float32)
        top = tl.sum(product, 1) * scale
        total += 1.0
        result += own_value.to(tl.float32)[None, :]
    top, total, result = _attended(q_low, q_high, k_low, k_high, value, begin, written, scale, top, total, result, KEYS)
    for start in range(begin + KEYS, written, MORE_KEYS):
        more_low, more_high, more_value = _tile(
            keys, values, page_table, start, written, kv_head, PAGE, KV_HEADS, SIZE, MORE_KEYS
        )
        top, total, result = _attended(
            q_low, q_high, more_low, more_high, more_value, start, written, scale, top, total, result, MORE_KEYS
        )
    slot = (kv_head * group + head) * SPLITS + part
    tl.store(parts + slot[:, None] * SIZE + at_v[None, :], result / total[:, None], (head < group)[:, None])
    tl.store(part_lse + slot, top + tl.log2(total), head < group)


@triton.jit(do_not_specialize_on_alignment=["kv_lens"])
def _merge_row(
    parts, part_lse, out, kv_lens,
    SIZE: tl.constexpr, SPLITS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    head, at, part = tl.program_id(0), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH), tl.arange(0, SPLITS)
    if PDL:
        gdc_launch_dependents()
    length = tl.load(kv_lens, cache_modifier=".cg")  # early: the kernel before leads, or one before that did
    used = part < tl.cdiv(length, _span(length, SPLITS, KEYS))
    slot = head * SPLITS + part
    if PDL:
        gdc_wait()
    logs = tl.load(part_lse + slot, used, float("-inf"))
    found = tl.load(parts + slot[:, None] * SIZE + at[None, :], used[:, None], 0.0)
    weight = tl.exp2(logs - tl.max(logs, 0))
    merged = tl.sum(found * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + head * SIZE + at, merged.to(out.dtype.element_ty))


def fits(heads: int, kv_heads: int, size: int) -> bool:
    """Return whether the kernels attend with this number of heads of this size."""
    return heads // kv_heads <= LEAST_TILE and size in (64, 128)


def attend_row(
    row: ProjectedRow, keys: torch.Tensor, values: torch.Tensor, page_table: torch.Tensor, kv_lens: torch.Tensor,
    scale: float, *, leads: bool,
) -> torch.Tensor:  # fmt: skip
    """Return the attention output ``[1, heads, d]`` of the token of ``row``, after writing its key and value. It sees the
    ``kv_lens[0]`` (int32, at least 1) keys of the pages ``page_table[0]`` (int32) of ``keys [pages, page_size, kv_heads, d]`` and
    ``values``, the last of which is its own. Both are contiguous and have the dtype of the projection, and ``fits`` holds.

    ``leads``: nothing that earlier kernels of the step write is read early.
    """
    kv_heads, size = keys.shape[2:]
    heads = row.qkv.shape[1] - 2 * kv_heads
    assert row.qkv.is_contiguous()
    assert keys.is_contiguous()
    assert values.is_contiguous()
    device = row.qkv.device
    out = torch.empty(1, heads, size, dtype=row.qkv.dtype, device=device)
    parts = torch.empty(heads, SPLITS, size, dtype=torch.float32, device=device)
    part_lse = torch.empty(heads, SPLITS, dtype=torch.float32, device=device)
    q_norm, k_norm, eps = row.norm or (None, None, 0.0)
    launch(
        _attend_row, (kv_heads, SPLITS),
        row.qkv, keys, values, row.table, row.positions, row.out_loc, page_table, kv_lens, q_norm, k_norm, parts, part_lse, eps, scale * LOG2_E,
        HEADS=heads, KV_HEADS=kv_heads, SIZE=size, PAGE=keys.shape[1], NORM=row.norm is not None,
        BLOCK_HEADS=LEAST_TILE, SPLITS=SPLITS, KEYS=KEYS, MORE_KEYS=MORE_KEYS, LEADS=leads, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    launch(
        _merge_row, (heads, size // WIDTH), parts, part_lse, out, kv_lens,
        SIZE=size, SPLITS=SPLITS, KEYS=KEYS, WIDTH=WIDTH, num_warps=1,
    )  # fmt: skip
    return out
