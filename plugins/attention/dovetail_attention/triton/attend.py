"""Attend with flash attention (arXiv 2205.14135, 2307.08691) over pages: each program computes items of a schedule.

The query heads of one key head are rows of one tile. Logits are in units of log2(e), so that exponentials are powers of
two.

With chunks of fixed size (``ScheduleEntries.chunk``) keys are merged chunk by chunk, in their order and by the
arithmetic of ``merge``, whether a program computes one chunk or all of them. The bits of a query's output then depend
only on its row.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.interfaces.attention import AttentionLayer
from dovetail.interfaces.store import KVTensors
from dovetail.ops.triton.halves import are_pairs, half_pairs, half_queries, power_of_rows
from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.pages import layout, prefetch_rows
from dovetail_attention.triton.schedule import RECORD, Schedule, ScheduleEntries

LOG2_E = math.log2(math.e)
FIXED, COMPUTED = tl.constexpr(1), tl.constexpr(2)
"""The kinds of scales: one for each head, or one for each token and head."""
WARP_GROUP_ROWS = 64
"""Products of at least this number of rows read values in shared memory. Others read them into registers, where transposed numbers of
8 bits would be read one by one: they take two neighbouring values (PAIRS) at once."""


class PartialResults(NamedTuple):
    """Hold the attention over chunks of keys, and the base-2 logarithms of the sums of exponentials.

    A logarithm of -inf means that no key was seen; ``out`` is then undefined.
    """

    out: torch.Tensor  # float32 [rows, kv_heads, value_dim]
    lse: torch.Tensor  # float32 [rows, kv_heads]

    @classmethod
    def empty(cls, rows: int, kv_heads: int, value_dim: int, device: torch.device) -> PartialResults:
        """Allocate memory for ``rows`` results of every key head."""
        make = torch.empty(rows * kv_heads * (value_dim + 1), dtype=torch.float32, device=device)
        out, lse = make.split([rows * kv_heads * value_dim, rows * kv_heads])
        return cls(out.view(rows, kv_heads, value_dim), lse.view(rows, kv_heads))


@triton.jit
def _blocks(
    top, total, acc, q_tile, q_rest, low, high, head, k, v, k_scales, v_scales, pages, place, position, tree_rows, tree_ok, positions, prefix,
    first_query, tree_width, window, scale, cap,
    PAGE: tl.constexpr, KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, BLOCK_K: tl.constexpr, REST: tl.constexpr,
    BLOCK_REST: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, K_HEAD: tl.constexpr,
    V_HEAD: tl.constexpr, SAME: tl.constexpr, SCALED: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr, TREE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend to keys ``[low, high)``. Unless MASKED, they are whole blocks that every query sees."""
    at_k, at_r, at_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_REST), tl.arange(0, BLOCK_V)
    if PAIRS:
        at_2 = tl.arange(0, BLOCK_V // 2)
        even, odd = tl.split(acc.reshape(acc.shape[0], BLOCK_V // 2, 2))
    for start in range(low, high, KEYS):
        key = start + tl.arange(0, KEYS)
        if MASKED:  # keys beyond the row may be NaN, which a product with 0 does not remove: they are not even loaded
            inside = key < high
            page = tl.load(pages + key // PAGE, inside, 0)
            mask_k, mask_v = inside[:, None] & (at_k < KEY_DIM)[None, :], inside[:, None] & (at_v < VALUE_DIM)[None, :]
            mask_r = inside[:, None] & (at_r < REST)[None, :]
        else:
            page = tl.load(pages + key // PAGE)
            mask_k, mask_v = (at_k < KEY_DIM)[None, :], (at_v < VALUE_DIM)[None, :]
            mask_r = (at_r < REST)[None, :]
        where = page.to(tl.int64) * PAGE + key % PAGE
        from_k = k + ((where * KV_HEADS + head) * K_HEAD)[:, None] + at_k[None, :]
        if not PAIRS:
            from_v = v + ((where * KV_HEADS + head) * V_HEAD)[:, None] + at_v[None, :]
        keys = tl.load(from_k, mask_k, 0.0) if MASKED or KEY_DIM != BLOCK_K else tl.load(from_k)
        keys = keys.to(q_tile.dtype)
        scores = tl.dot(q_tile, tl.trans(keys), input_precision="ieee")
        if REST:
            from_r = k + ((where * KV_HEADS + head) * K_HEAD)[:, None] + KEY_DIM + at_r[None, :]
            rest = tl.load(from_r, mask_r, 0.0)
            scores = tl.dot(q_rest, tl.trans(rest.to(q_rest.dtype)), scores, input_precision="ieee")
        if SCALED == COMPUTED:
            at_scale = where * KV_HEADS + head
            k_scale = tl.load(k_scales + at_scale, inside, 0.0) if MASKED else tl.load(k_scales + at_scale)
            v_scale = tl.load(v_scales + at_scale, inside, 0.0) if MASKED else tl.load(v_scales + at_scale)
            scores *= k_scale.to(tl.float32)[None, :]
        if CAP:
            grown = tl.exp2(tl.minimum(scores * scale, 100.0))  # e^(2x) of tanh(x) = 1 - 2 / (1 + e^(2x))
            scores = cap - 2 * cap / (1 + grown)
        else:
            scores *= scale
        if MASKED:
            seen = inside[None, :]
            if TREE:
                in_tree = inside & (key >= prefix)
                marks = tl.load(
                    tree_rows[:, None] + (key - prefix)[None, :],
                    tree_ok[:, None] & (in_tree & (key - prefix < tree_width))[None, :],
                    0,
                )
                seen = seen & ((key < prefix)[None, :] | (marks != 0))
            elif CAUSAL:
                seen = seen & (key[None, :] <= place[:, None])
            if WINDOW:
                if TREE:
                    depth = tl.load(positions + first_query + key - prefix, in_tree, 0).to(tl.int32)
                    key_position = tl.where(in_tree, depth, key)
                else:
                    key_position = key
                seen = seen & (key_position[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        if PAIRS:
            from_v = v + ((where * KV_HEADS + head) * (V_HEAD // 2))[:, None] + at_2[None, :]
            mask_2 = (at_2 < VALUE_DIM // 2)[None, :]
            pairs = tl.load(from_v, inside[:, None] & mask_2 if MASKED else mask_2, 0)
            values_even, values_odd = half_pairs(pairs, k.dtype.element_ty)
            if SCALED == COMPUTED:  # scales of any size: the largest product of a row becomes 1 to 2 in float16
                weights *= v_scale.to(tl.float32)[None, :]
                unit = power_of_rows(weights)
                weights = (weights / unit[:, None]).to(tl.float16)
                even = even * shrink[:, None] + unit[:, None] * tl.dot(weights, values_even)
                odd = odd * shrink[:, None] + unit[:, None] * tl.dot(weights, values_odd)
            else:
                even = tl.dot(weights.to(tl.float16), values_even, even * shrink[:, None])
                odd = tl.dot(weights.to(tl.float16), values_odd, odd * shrink[:, None])
        else:
            values = keys
            if not SAME:
                values = tl.load(from_v, mask_v, 0.0) if MASKED or VALUE_DIM != BLOCK_V else tl.load(from_v)
            if SCALED == COMPUTED and q_tile.dtype == tl.float16:  # weights times scales could be too small for it
                values = (values.to(tl.float32) * v_scale.to(tl.float32)[:, None]).to(tl.float16)
            elif SCALED == COMPUTED:
                weights *= v_scale.to(tl.float32)[None, :]
            acc = tl.dot(
                weights.to(q_tile.dtype), values.to(q_tile.dtype), acc * shrink[:, None], input_precision="ieee"
            )
        top = higher
    if PAIRS:
        acc = tl.interleave(even, odd)
    return top, total, acc


@triton.jit
def _both(
    top, total, acc, q_tile, q_rest, low, middle, high, head, k, v, k_scales, v_scales, pages, place, position, tree_rows, tree_ok, positions, prefix,
    first_query, tree_width, window, scale, cap,
    PAGE: tl.constexpr, KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, BLOCK_K: tl.constexpr, REST: tl.constexpr,
    BLOCK_REST: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, K_HEAD: tl.constexpr,
    V_HEAD: tl.constexpr, SAME: tl.constexpr, SCALED: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
    KEYS: tl.constexpr, CAUSAL: tl.constexpr, TREE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Attend to keys ``[low, middle)``, which every query sees, and to keys ``[middle, high)``."""
    if not WINDOW:
        top, total, acc = _blocks(
            top, total, acc, q_tile, q_rest, low, middle, head, k, v, k_scales, v_scales, pages, place, position, tree_rows, tree_ok, positions, prefix,
            first_query, tree_width, window, scale, cap,
            PAGE, KV_HEADS, KEY_DIM, BLOCK_K, REST, BLOCK_REST, VALUE_DIM, BLOCK_V, K_HEAD, V_HEAD, SAME, SCALED, HALF, PAIRS,
            KEYS, CAUSAL, TREE, WINDOW, CAP, False,
        )  # fmt: skip
    return _blocks(
        top, total, acc, q_tile, q_rest, middle, high, head, k, v, k_scales, v_scales, pages, place, position, tree_rows, tree_ok, positions, prefix,
        first_query, tree_width, window, scale, cap,
        PAGE, KV_HEADS, KEY_DIM, BLOCK_K, REST, BLOCK_REST, VALUE_DIM, BLOCK_V, K_HEAD, V_HEAD, SAME, SCALED, HALF, PAIRS,
        KEYS, CAUSAL, TREE, WINDOW, CAP, True,
    )  # fmt: skip


@triton.jit
def _item(
    item, head, q, k, v, k_scales, v_scales, out, partial, lse, records, table, positions, tree, sinks,
    q_token, q_head, table_row, tree_row, tree_width, window, scale, cap,
    PAGE: tl.constexpr, KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, BLOCK_K: tl.constexpr, REST: tl.constexpr,
    BLOCK_REST: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, K_HEAD: tl.constexpr,
    V_HEAD: tl.constexpr, SAME: tl.constexpr, SCALED: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    CAUSAL: tl.constexpr, TREE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    CHUNK: tl.constexpr, RECORD: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    record = records + item * RECORD
    entry, first_m = tl.load(record, cache_modifier=".cg"), tl.load(record + 1, cache_modifier=".cg")
    low, high = tl.load(record + 2, cache_modifier=".cg"), tl.load(record + 3, cache_modifier=".cg")
    first_query, queries = tl.load(record + 4, cache_modifier=".cg"), tl.load(record + 5, cache_modifier=".cg")
    length, base = tl.load(record + 6, cache_modifier=".cg"), tl.load(record + 7, cache_modifier=".cg")
    pages = table + entry.to(tl.int64) * table_row
    if WAIT:
        key = low + tl.arange(0, KEYS)
        page = tl.load(pages + key // PAGE, key < high, 0)
        prefetch_rows(k, page, key, head, PAGE, KV_HEADS, KEY_DIM, BLOCK_K, K_HEAD)
        if PAIRS:
            prefetch_rows(v, page, key, head, PAGE, KV_HEADS, VALUE_DIM // 2, BLOCK_V // 2, V_HEAD // 2)
        elif not SAME:
            prefetch_rows(v, page, key, head, PAGE, KV_HEADS, VALUE_DIM, BLOCK_V, V_HEAD)
        gdc_wait()

    m = first_m + tl.arange(0, ROWS)
    real = m < queries * GROUP
    token = (first_query + m // GROUP).to(tl.int64)
    q_row = head * GROUP + m % GROUP
    at_k, at_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    from_q = q + (token * q_token + q_row * q_head)[:, None]
    q_tile = tl.load(from_q + at_k[None, :], real[:, None] & (at_k < KEY_DIM)[None, :], 0.0)
    q_rest = q_tile
    if REST:
        at_r = tl.arange(0, BLOCK_REST)
        q_rest = tl.load(from_q + KEY_DIM + at_r[None, :], real[:, None] & (at_r < REST)[None, :], 0.0)
    if SCALED == FIXED:
        scale *= tl.load(k_scales + head)
    if HALF:
        q_tile, q_rest, scale = half_queries(q_tile, q_rest, scale, REST)

    prefix = length - queries
    place = prefix + m // GROUP
    position = place
    if WINDOW and (TREE or not CAUSAL):
        position = tl.load(positions + token, real, 0).to(tl.int32)
    top = tl.full([ROWS], -1e30, tl.float32)  # finite, so that rows that see no key do not become NaN
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_V], tl.float32)
    free = high
    if WINDOW:
        free = low
    elif TREE:
        free = tl.minimum(high, prefix)
    elif CAUSAL:
        free = tl.minimum(high, prefix + first_m // GROUP + 1)
    tree_rows = tree + token * tree_row
    if CHUNK:
        if SINKS:
            sink = tl.load(sinks + q_row, real, 0.0).to(tl.float32) * 1.4426950408889634
            top = tl.where(base < 0, sink, top)  # otherwise the merge adds the sink
            total = tl.where(base < 0, 1.0, total)
        for first in range(low // CHUNK * CHUNK, high, CHUNK):
            begin, end = tl.maximum(low, first), tl.minimum(high, first + CHUNK)
            middle = begin + tl.maximum(tl.minimum(free, end) - begin, 0) // KEYS * KEYS
            top_c = tl.full([ROWS], -1e30, tl.float32)
            total_c = tl.zeros([ROWS], tl.float32)
            acc_c = tl.zeros([ROWS, BLOCK_V], tl.float32)
            top_c, total_c, acc_c = _both(
                top_c, total_c, acc_c, q_tile, q_rest, begin, middle, end, head, k, v, k_scales, v_scales, pages, place, position, tree_rows, real,
                positions, prefix, first_query, tree_width, window, scale, cap,
                PAGE, KV_HEADS, KEY_DIM, BLOCK_K, REST, BLOCK_REST, VALUE_DIM, BLOCK_V, K_HEAD, V_HEAD, SAME, SCALED, HALF, PAIRS,
                KEYS, CAUSAL, TREE, WINDOW, CAP,
            )  # fmt: skip
            sum_c = tl.where(total_c > 0, total_c, 1.0)
            found = acc_c / sum_c[:, None]
            lse_c = tl.where(total_c > 0, top_c + tl.log2(sum_c), float("-inf"))
            higher = tl.maximum(top, lse_c)
            shrink, weight = tl.exp2(top - higher), tl.exp2(lse_c - higher)
            acc = acc * shrink[:, None] + weight[:, None] * found
            total = total * shrink + weight
            top = higher
    elif WINDOW and not CAUSAL:  # the keys that every query sees come last
        all_see = tl.maximum(tl.max(position, 0) + 1 - window, low)
        middle = high - tl.maximum(high - all_see, 0) // KEYS * KEYS
        top, total, acc = _blocks(
            top, total, acc, q_tile, q_rest, low, middle, head, k, v, k_scales, v_scales, pages, place, position, tree_rows, real,
            positions, prefix, first_query, tree_width, window, scale, cap,
            PAGE, KV_HEADS, KEY_DIM, BLOCK_K, REST, BLOCK_REST, VALUE_DIM, BLOCK_V, K_HEAD, V_HEAD, SAME, SCALED, HALF, PAIRS,
            KEYS, CAUSAL, TREE, WINDOW, CAP, True,
        )  # fmt: skip
        top, total, acc = _blocks(
            top, total, acc, q_tile, q_rest, middle, high, head, k, v, k_scales, v_scales, pages, place, position, tree_rows, real,
            positions, prefix, first_query, tree_width, window, scale, cap,
            PAGE, KV_HEADS, KEY_DIM, BLOCK_K, REST, BLOCK_REST, VALUE_DIM, BLOCK_V, K_HEAD, V_HEAD, SAME, SCALED, HALF, PAIRS,
            KEYS, CAUSAL, TREE, WINDOW, CAP, False,
        )  # fmt: skip
    else:
        middle = low + tl.maximum(free - low, 0) // KEYS * KEYS
        top, total, acc = _both(
            top, total, acc, q_tile, q_rest, low, middle, high, head, k, v, k_scales, v_scales, pages, place, position, tree_rows, real,
            positions, prefix, first_query, tree_width, window, scale, cap,
            PAGE, KV_HEADS, KEY_DIM, BLOCK_K, REST, BLOCK_REST, VALUE_DIM, BLOCK_V, K_HEAD, V_HEAD, SAME, SCALED, HALF, PAIRS,
            KEYS, CAUSAL, TREE, WINDOW, CAP,
        )  # fmt: skip

    if SCALED == FIXED:
        acc *= tl.load(v_scales + head)
    mask = real[:, None] & (at_v < VALUE_DIM)[None, :]
    if base < 0:
        if SINKS and not CHUNK:
            sink = tl.load(sinks + q_row, real, 0.0).to(tl.float32) * 1.4426950408889634
            higher = tl.maximum(top, sink)
            shrink = tl.exp2(top - higher)
            total = total * shrink + tl.exp2(sink - higher)
            acc = acc * shrink[:, None]
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        to = out + (token * (KV_HEADS * GROUP) + q_row)[:, None] * VALUE_DIM + at_v[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask)
    else:
        row = (base + m).to(tl.int64) * KV_HEADS + head
        sum_or_1 = tl.where(total > 0, total, 1.0)
        tl.store(lse + row, tl.where(total > 0, top + tl.log2(sum_or_1), float("-inf")), real)
        tl.store(partial + row[:, None] * VALUE_DIM + at_v[None, :], acc / sum_or_1[:, None], mask)


@triton.jit(
    do_not_specialize=["table_row", "tree_row", "tree_width", "window"],
    do_not_specialize_on_alignment=["table", "positions", "tree", "sinks"],
)
def _attend(
    q, k, v, k_scales, v_scales, out, partial, lse, records, count, table, positions, tree, sinks,
    q_token, q_head, table_row, tree_row, tree_width, window, scale, cap,
    PAGE: tl.constexpr, KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, BLOCK_K: tl.constexpr, REST: tl.constexpr,
    BLOCK_REST: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, K_HEAD: tl.constexpr,
    V_HEAD: tl.constexpr, SAME: tl.constexpr, SCALED: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    CAUSAL: tl.constexpr, TREE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    CHUNK: tl.constexpr, RECORD: tl.constexpr, FEWER: tl.constexpr, LEADS: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    if PDL:
        if LEADS:  # in this order, so that the schedule is complete before the next kernel starts
            gdc_wait()
        gdc_launch_dependents()
        if not AHEAD:
            gdc_wait()
    head = tl.program_id(0) % KV_HEADS
    first = tl.program_id(0) // KV_HEADS
    items = tl.load(count, cache_modifier=".cg")
    if FEWER:
        for item in range(first, items, tl.num_programs(0) // KV_HEADS):
            _item(
                item, head, q, k, v, k_scales, v_scales, out, partial, lse, records, table, positions, tree, sinks,
                q_token, q_head, table_row, tree_row, tree_width, window, scale, cap,
                PAGE, KV_HEADS, KEY_DIM, BLOCK_K, REST, BLOCK_REST, VALUE_DIM, BLOCK_V, K_HEAD, V_HEAD, SAME, SCALED, HALF, PAIRS,
                GROUP, ROWS, KEYS, CAUSAL, TREE, WINDOW, CAP, SINKS, CHUNK, RECORD, PDL and AHEAD,
            )  # fmt: skip
    elif first < items:
        _item(
            first, head, q, k, v, k_scales, v_scales, out, partial, lse, records, table, positions, tree, sinks,
            q_token, q_head, table_row, tree_row, tree_width, window, scale, cap,
            PAGE, KV_HEADS, KEY_DIM, BLOCK_K, REST, BLOCK_REST, VALUE_DIM, BLOCK_V, K_HEAD, V_HEAD, SAME, SCALED, HALF, PAIRS,
            GROUP, ROWS, KEYS, CAUSAL, TREE, WINDOW, CAP, SINKS, CHUNK, RECORD, PDL and AHEAD,
        )  # fmt: skip
    if PDL and AHEAD:
        gdc_wait()  # also in programs that have no item


def attend(
    q: torch.Tensor,
    kv: KVTensors,
    entries: ScheduleEntries,
    schedule: Schedule,
    layer: AttentionLayer,
    positions: torch.Tensor,
    out: torch.Tensor,
    partial: PartialResults,
    *,
    leads: bool,
) -> None:
    """Fill the rows of ``out [tokens, heads, value_dim]`` and ``partial`` that the schedule names. ``kv`` are a layer's
    pages. Logits are multiplied by the scales of keys, and the softmax's weights by those of values, in float32. Products with
    numbers of 8 bits are in float16 (see ``ops.triton.halves``), except those of many queries with keys that have scales of their own.

    ``leads``: this launch is a leader (see ``launch``), the first after ``fill``. Other launches read the schedule and
    the page tables before they wait for the previous kernel, if there may be ``fewer`` programs than items: this makes
    verify steps a sixth faster, where it made prompts 2 % slower (H200).
    """
    keys, values, scales = kv
    found = layout(keys, values)
    scaled = 0 if scales is None else FIXED.value if scales.keys.stride(0) == 0 else COMPUTED.value
    kv_heads = keys.shape[2]
    assert q.stride(2) == 1
    assert out.is_contiguous()
    tile, tree, cap = entries.tile, entries.tree, layer.soft_cap
    eight_bits = keys.element_size() == 1 and q.element_size() == 2 and not found["SAME"]
    pairs = eight_bits and tile.rows < WARP_GROUP_ROWS and are_pairs(values, found["V_HEAD"])
    half = pairs or (eight_bits and scaled != COMPUTED.value)
    ahead = entries.fewer and not entries.chunk and not leads
    scale = layer.scale * LOG2_E if cap is None else 2 * LOG2_E * layer.scale / cap
    launch(
        _attend, (entries.programs * kv_heads,),
        q, keys, values.view(torch.int16) if pairs else values, *(scales or (None, None)), out, *partial, schedule.records, schedule.count, entries.table, positions,
        positions if tree is None else tree, q if layer.sinks is None else layer.sinks,
        q.stride(0), q.stride(1), entries.table.stride(0), 0 if tree is None else tree.stride(0),
        0 if tree is None else tree.shape[1], layer.window or 0, scale, 0.0 if cap is None else cap * LOG2_E,
        **found, SCALED=scaled, HALF=half, PAIRS=pairs, GROUP=q.shape[1] // kv_heads,
        ROWS=tile.rows, KEYS=tile.keys, CAUSAL=entries.causal, TREE=tree is not None, WINDOW=layer.window is not None,
        CAP=cap is not None, SINKS=layer.sinks is not None, CHUNK=entries.chunk, RECORD=RECORD,
        FEWER=entries.fewer, LEADS=leads, AHEAD=ahead, num_warps=tile.num_warps, num_stages=tile.num_stages, as_written=entries.chunk > 0,
    )  # fmt: skip
