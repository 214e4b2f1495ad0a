"""Attend to latents: multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) in its absorbed form.

A token has one key for all heads, and the first numbers of this key are its value. The pairs of a query and a head are
the rows of a tile, like the query heads of one key head in ``attend``. Each block of latents is read once for all rows
of a tile and is an operand of both products. A key is read in two parts, the value and the rest, because the sizes of
operands must be powers of two.

With ``flip``, latents are the left operand of both products and the accumulator is transposed: matrix units of Hopper
multiply 64 rows of the left operand at a time, so that few heads do not fill them, but latents do.

With ``halves``, latents are read in two halves, which takes fewer registers, and exponentials are summed per key until the end, because
a sum over keys makes the warps of a program wait for each other. Programs with few rows wait for most of the time. If no other program runs
on their multiprocessor meanwhile, the products of the halves do not wait for each other either: their sums are added.

Layers with a window, a soft cap or sinks use ``attend`` instead, which reads the same schedules.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.pages import block, prefetch_rows
from dovetail_attention.triton.attend import LOG2_E, PartialResults
from dovetail_attention.triton.schedule import RECORD, Schedule, ScheduleEntries


class LatentPages(NamedTuple):
    """Hold the pages of a layer, ``[pages, page_size, 1, size]``, the number of first elements that are the value, and the
    scales of latents, ``[pages, page_size, 1]``, if they have some."""

    pages: torch.Tensor
    value_dim: int
    scales: torch.Tensor | None = None

    def constants(self) -> dict[str, int]:
        """Return the constants of kernels that read the pages. Tokens must follow each other within the pool.

        - PAGE
        - VALUE_DIM and REST elements of a key are read in blocks of BLOCK_V and BLOCK_REST
        - TOKEN: elements from one token to the next
        - SCALED: there are scales
        """
        page_size, kv_heads, size = self.pages.shape[1:]
        assert kv_heads == 1
        assert self.pages.stride(3) == 1
        assert self.pages.stride(0) == page_size * self.pages.stride(1)
        assert self.scales is None or self.scales.is_contiguous()
        rest = size - self.value_dim
        return {
            "PAGE": page_size,
            "VALUE_DIM": self.value_dim,
            "BLOCK_V": block(self.value_dim),
            "REST": rest,
            "BLOCK_REST": block(rest),
            "TOKEN": self.pages.stride(1),
            "SCALED": self.scales is not None,
        }

    def can_halve(self, dtype: torch.dtype) -> bool:
        """Return True if both halves of values, and the rest of keys, are operands of products with queries of ``dtype`` as they
        are: they need neither padding nor a conversion."""
        half, rest = self.value_dim // 2, self.pages.shape[3] - self.value_dim
        return self.value_dim == 2 * block(half) and rest == block(rest) and self.pages.dtype == dtype


@triton.jit
def _times(acc, factors, FLIP: tl.constexpr):
    """Multiply each row of a tile by its factor."""
    return acc * factors[None, :] if FLIP else acc * factors[:, None]


@triton.jit
def _seen(key, high, limit, tree_rows, tree_ok, prefix, tree_width, TREE: tl.constexpr):
    """Return which keys each pair m of the tile sees: those before ``limit[m]`` and, with a tree, those of its own queries that
    are marked."""
    seen = key[None, :] < limit[:, None]
    if TREE:
        in_tree = (key < high) & (key >= prefix) & (key - prefix < tree_width)
        marks = tl.load(tree_rows[:, None] + (key - prefix)[None, :], tree_ok[:, None] & in_tree[None, :], 0)
        seen = seen | (marks != 0)
    return seen


@triton.jit
def _blocks(
    q_tile, q_rest, low, high, kv, scales, pages, limit, tree_rows, tree_ok, prefix, tree_width, scale,
    PAGE: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr,
    TOKEN: tl.constexpr, SCALED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, FLIP: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Attend to the keys of ``[low, high)`` that ``_seen`` returns."""
    MULTIPLIED: tl.constexpr = SCALED and q_tile.dtype == tl.float16  # weights times scales could be too small for it
    at, at_r = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_REST)
    top = tl.full([ROWS], -1e30, tl.float32)  # finite, so that rows that see no key do not become NaN
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([BLOCK_V, ROWS] if FLIP else [ROWS, BLOCK_V], tl.float32)
    # Keys beyond the row may be NaN, which a product with 0 does not remove: the last key is read in their place.
    last = tl.maximum(high - 1, 0)
    next_page = tl.load(pages + tl.minimum(low + tl.arange(0, KEYS), last) // PAGE)
    for start in range(low, high, KEYS):
        key = start + tl.arange(0, KEYS)
        page = next_page  # read one block earlier, so that the compiler reads latents several blocks ahead
        next_page = tl.load(pages + tl.minimum(key + KEYS, last) // PAGE)
        place = page.to(tl.int64) * PAGE + tl.minimum(key, last) % PAGE
        from_k = kv + (place * TOKEN)[:, None]
        if VALUE_DIM == BLOCK_V:
            keys = tl.load(from_k + at[None, :])
        else:
            keys = tl.load(from_k + at[None, :], (at < VALUE_DIM)[None, :], 0.0)
        if SCALED:
            own = tl.load(scales + place).to(tl.float32)
        if MULTIPLIED:
            keys = keys.to(tl.float32) * own[:, None]
        keys = keys.to(q_tile.dtype)
        if FLIP:
            scores = tl.dot(keys, tl.trans(q_tile), input_precision="ieee")
        else:
            scores = tl.dot(q_tile, tl.trans(keys), input_precision="ieee")
        if REST:
            if REST == BLOCK_REST:
                rest = tl.load(from_k + VALUE_DIM + at_r[None, :])
            else:
                rest = tl.load(from_k + VALUE_DIM + at_r[None, :], (at_r < REST)[None, :], 0.0)
            if MULTIPLIED:
                rest = rest.to(tl.float32) * own[:, None]
            rest = rest.to(q_tile.dtype)
            if FLIP:
                scores = tl.dot(rest, tl.trans(q_rest), scores, input_precision="ieee")
            else:
                scores = tl.dot(q_rest, tl.trans(rest), scores, input_precision="ieee")
        if FLIP:
            scores = tl.trans(scores)
        if SCALED and not MULTIPLIED:
            scores *= own[None, :]
        seen = _seen(key, high, limit, tree_rows, tree_ok, prefix, tree_width, TREE)
        scores = tl.where(seen, scores * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        if SCALED and not MULTIPLIED:
            weights *= own[None, :]
        weights = weights.to(q_tile.dtype)
        if FLIP:
            acc = tl.dot(tl.trans(keys), tl.trans(weights), _times(acc, shrink, True), input_precision="ieee")
        else:
            acc = tl.dot(weights, keys, _times(acc, shrink, False), input_precision="ieee")
        top = higher
    return top, total, acc


@triton.jit
def _blocks_in_halves(
    q_a, q_b, q_rest, low, high, kv, pages, limit, tree_rows, tree_ok, prefix, tree_width, scale,
    PAGE: tl.constexpr, VALUE_DIM: tl.constexpr, REST: tl.constexpr, TOKEN: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, TREE: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """Do what ``_blocks`` does, with both halves of queries and of the accumulator. ``ALONE``: no other program runs on
    the multiprocessor."""
    HALF: tl.constexpr = VALUE_DIM // 2
    at, at_r = tl.arange(0, HALF)[None, :], tl.arange(0, REST)[None, :]
    top = tl.full([ROWS], -1e30, tl.float32)
    totals = tl.zeros([ROWS, KEYS], tl.float32)
    acc_a, acc_b = tl.zeros([ROWS, HALF], tl.float32), tl.zeros([ROWS, HALF], tl.float32)
    last = tl.maximum(high - 1, 0)
    next_page = tl.load(pages + tl.minimum(low + tl.arange(0, KEYS), last).to(tl.uint32) // PAGE)
    for start in range(low, high, KEYS):
        key = start + tl.arange(0, KEYS)
        page = next_page
        if ALONE:  # fewer operations with 64 bits: no other program hides them
            next_page = tl.load(pages + tl.minimum(key + KEYS, last).to(tl.uint32) // PAGE)
            within = ((tl.minimum(key, last).to(tl.uint32) % PAGE).to(tl.int32) * TOKEN)[:, None]
            from_page = (kv + page.to(tl.int64) * (PAGE * TOKEN))[:, None]
            from_k, from_rest = from_page + (within + at), from_page + (within + VALUE_DIM + at_r)
        else:
            next_page = tl.load(pages + tl.minimum(key + KEYS, last) // PAGE)
            place = page.to(tl.int64) * PAGE + tl.minimum(key, last) % PAGE
            from_k, from_rest = kv + (place * TOKEN)[:, None] + at, kv + (place * TOKEN)[:, None] + VALUE_DIM + at_r
        keys_a, keys_b, rest = tl.load(from_k), tl.load(from_k + HALF), tl.load(from_rest)
        scores = tl.dot(q_a, tl.trans(keys_a), input_precision="ieee")
        if ALONE:
            more = tl.dot(q_b, tl.trans(keys_b), input_precision="ieee")
            others = tl.dot(q_rest, tl.trans(rest), input_precision="ieee")
            # each product has its factor: otherwise the compiler makes them one sum, of which each waits for the one before
            scores = scores * scale + (more * scale + others * scale)
        else:
            scores = tl.dot(q_b, tl.trans(keys_b), scores, input_precision="ieee")
            scores = tl.dot(q_rest, tl.trans(rest), scores, input_precision="ieee") * scale
        seen = _seen(key, high, limit, tree_rows, tree_ok, prefix, tree_width, TREE)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        totals = totals * shrink[:, None] + weights
        weights = weights.to(q_a.dtype)
        acc_a = tl.dot(weights, keys_a, acc_a * shrink[:, None], input_precision="ieee")
        acc_b = tl.dot(weights, keys_b, acc_b * shrink[:, None], input_precision="ieee")
        top = higher
    return top, tl.sum(totals, 1), acc_a, acc_b


@triton.jit
def _store(result, to_out, to_partial, base, mask) -> None:
    """Store a result as an output or, with a ``base``, as a partial result."""
    if base < 0:
        tl.store(to_out, result.to(to_out.dtype.element_ty), mask)
    else:
        tl.store(to_partial, result, mask)


@triton.jit
def _item(
    item, q, kv, scales, out, partial, lse, records, table, tree, q_token, q_head, table_row, tree_row, tree_width, scale,
    PAGE: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr,
    TOKEN: tl.constexpr, SCALED: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, FLIP: tl.constexpr,
    HALVES: tl.constexpr, ALONE: tl.constexpr, CAUSAL: tl.constexpr, TREE: tl.constexpr, CHUNK: tl.constexpr, RECORD: tl.constexpr,
    WAIT: tl.constexpr,
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
        prefetch_rows(kv, page, key, 0, PAGE, 1, VALUE_DIM + REST, BLOCK_V, TOKEN)
        gdc_wait()

    m = first_m + tl.arange(0, ROWS)
    real = m < queries * GROUP
    token, head = (first_query + m // GROUP).to(tl.int64), m % GROUP
    at, at_r = tl.arange(0, BLOCK_V // 2 if HALVES else BLOCK_V), tl.arange(0, BLOCK_REST)
    from_q = q + (token * q_token + head * q_head)[:, None]
    q_tile = tl.load(from_q + at[None, :], real[:, None] & (at < VALUE_DIM)[None, :], 0.0)
    if HALVES:
        q_b = tl.load(from_q + VALUE_DIM // 2 + at[None, :], real[:, None], 0.0)
    q_rest = q_tile
    if REST:
        q_rest = tl.load(from_q + VALUE_DIM + at_r[None, :], real[:, None] & (at_r < REST)[None, :], 0.0)

    prefix = length - queries
    limit = tl.zeros([ROWS], tl.int32) + high
    if TREE:
        limit = tl.minimum(limit, prefix)
    elif CAUSAL:
        limit = tl.minimum(limit, prefix + m // GROUP + 1)
    tree_rows = tree + token * tree_row
    if HALVES:
        top, total, acc, acc_b = _blocks_in_halves(
            q_tile, q_b, q_rest, low, high, kv, pages, limit, tree_rows, real, prefix, tree_width, scale,
            PAGE, VALUE_DIM, REST, TOKEN, ROWS, KEYS, TREE, ALONE,
        )  # fmt: skip
    elif CHUNK:
        top = tl.full([ROWS], -1e30, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([BLOCK_V, ROWS] if FLIP else [ROWS, BLOCK_V], tl.float32)
        for first in range(low // CHUNK * CHUNK, high, CHUNK):
            begin, end = tl.maximum(low, first), tl.minimum(high, first + CHUNK)
            top_c, total_c, acc_c = _blocks(
                q_tile, q_rest, begin, end, kv, scales, pages, tl.minimum(limit, end), tree_rows, real, prefix, tree_width, scale,
                PAGE, VALUE_DIM, BLOCK_V, REST, BLOCK_REST, TOKEN, SCALED, ROWS, KEYS, FLIP, TREE,
            )  # fmt: skip
            sum_c = tl.where(total_c > 0, total_c, 1.0)
            found = acc_c / sum_c[None, :] if FLIP else acc_c / sum_c[:, None]
            lse_c = tl.where(total_c > 0, top_c + tl.log2(sum_c), float("-inf"))
            higher = tl.maximum(top, lse_c)
            shrink, weight = tl.exp2(top - higher), tl.exp2(lse_c - higher)
            acc = _times(acc, shrink, FLIP) + _times(found, weight, FLIP)
            total = total * shrink + weight
            top = higher
    else:
        top, total, acc = _blocks(
            q_tile, q_rest, low, high, kv, scales, pages, limit, tree_rows, real, prefix, tree_width, scale,
            PAGE, VALUE_DIM, BLOCK_V, REST, BLOCK_REST, TOKEN, SCALED, ROWS, KEYS, FLIP, TREE,
        )  # fmt: skip

    sum_or_1 = tl.where(total > 0, total, 1.0)
    row, mask = (base + m).to(tl.int64), real[:, None] & (at < VALUE_DIM)[None, :]
    to_out = out + (token * GROUP + head)[:, None] * VALUE_DIM + at[None, :]
    to_partial = partial + row[:, None] * VALUE_DIM + at[None, :]
    if base >= 0:
        tl.store(lse + row, tl.where(total > 0, top + tl.log2(sum_or_1), float("-inf")), real)
    _store(tl.trans(acc / sum_or_1[None, :]) if FLIP else acc / sum_or_1[:, None], to_out, to_partial, base, mask)
    if HALVES:
        _store(acc_b / sum_or_1[:, None], to_out + VALUE_DIM // 2, to_partial + VALUE_DIM // 2, base, mask)


@triton.jit(
    do_not_specialize=["table_row", "tree_row", "tree_width"],
    do_not_specialize_on_alignment=["table", "tree"],
)
def _latent(
    q, kv, scales, out, partial, lse, records, count, span_starts, table, tree,
    q_token, q_head, table_row, tree_row, tree_width, scale,
    PAGE: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr,
    TOKEN: tl.constexpr, SCALED: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, FLIP: tl.constexpr,
    HALVES: tl.constexpr, ALONE: tl.constexpr, CAUSAL: tl.constexpr, TREE: tl.constexpr, CHUNK: tl.constexpr, RECORD: tl.constexpr,
    FEWER: tl.constexpr, LEVEL: tl.constexpr, LEADS: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    if PDL:
        if LEADS:  # in this order, so that the schedule is complete before the next kernel starts
            gdc_wait()
        gdc_launch_dependents()
        if not AHEAD:
            gdc_wait()
    first, step = tl.program_id(0), tl.num_programs(0)
    end = tl.load(count, cache_modifier=".cg")
    if LEVEL:
        tiles: tl.constexpr = (GROUP + ROWS - 1) // ROWS
        part, tile = first // tiles, first % tiles
        first = tl.load(span_starts + part, cache_modifier=".cg") * tiles + tile
        end = tl.load(span_starts + part + 1, cache_modifier=".cg") * tiles
        step = tiles
    if FEWER:
        for item in range(first, end, step):
            _item(
                item, q, kv, scales, out, partial, lse, records, table, tree,
                q_token, q_head, table_row, tree_row, tree_width, scale,
                PAGE, VALUE_DIM, BLOCK_V, REST, BLOCK_REST, TOKEN, SCALED, GROUP, ROWS, KEYS, FLIP, HALVES, ALONE, CAUSAL, TREE, CHUNK,
                RECORD, PDL and AHEAD,
            )  # fmt: skip
    elif first < end:
        _item(
            first, q, kv, scales, out, partial, lse, records, table, tree,
            q_token, q_head, table_row, tree_row, tree_width, scale,
            PAGE, VALUE_DIM, BLOCK_V, REST, BLOCK_REST, TOKEN, SCALED, GROUP, ROWS, KEYS, FLIP, HALVES, ALONE, CAUSAL, TREE, CHUNK,
            RECORD, PDL and AHEAD,
        )  # fmt: skip
    if PDL and AHEAD:
        gdc_wait()  # also in programs that have no item


def attend_latents(
    q: torch.Tensor,
    latents: LatentPages,
    entries: ScheduleEntries,
    schedule: Schedule,
    scale: float,
    out: torch.Tensor,
    partial: PartialResults,
    *,
    leads: bool,
) -> None:
    """Fill the rows of ``out [tokens, heads, value_dim]`` and ``partial`` that the schedule names. ``q`` is ``[tokens,
    heads, size of a latent]``. Logits are multiplied by ``scale``. For ``leads`` see ``attend``.
    """
    assert q.stride(2) == 1
    assert out.is_contiguous()
    tile, tree = entries.tile, entries.tree
    launch(
        _latent, (entries.programs,),
        q, latents.pages, latents.pages if latents.scales is None else latents.scales, out, *partial, schedule.records, schedule.count, schedule.span_starts, entries.table,
        entries.table if tree is None else tree,
        q.stride(0), q.stride(1), entries.table.stride(0), 0 if tree is None else tree.stride(0),
        0 if tree is None else tree.shape[1], scale * LOG2_E,
        **latents.constants(), GROUP=q.shape[1], ROWS=tile.rows, KEYS=tile.keys, FLIP=tile.flip,
        HALVES=tile.halves and not entries.chunk and latents.can_halve(q.dtype), ALONE=tile.resident == 1,
        CAUSAL=entries.causal, TREE=tree is not None, CHUNK=entries.chunk, RECORD=RECORD, FEWER=entries.fewer,
        LEVEL=entries.level, LEADS=leads, AHEAD=entries.fewer and not entries.chunk and not leads,
        num_warps=tile.num_warps, num_stages=tile.num_stages, as_written=entries.chunk > 0, registers=tile.registers,
    )  # fmt: skip
