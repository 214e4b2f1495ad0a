"""Attend over keys and values that prompts have expanded from latents: ragged, not in pages, with a head of keys and of
values for each query head, and with values of another size than keys.

Programs run head by head, so that those that run at the same time read the keys of few heads, which fit into the L2
cache. A key is read in two parts, because the sizes of operands must be powers of two (192 = 128 + 64).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.pages import block
from dovetail_attention.triton import tiles
from dovetail_attention.triton.attend import LOG2_E, PartialResults
from dovetail_attention.triton.merge import merge
from dovetail_attention.triton.schedule import RECORD, Schedule, ScheduleEntries, fill

if TYPE_CHECKING:
    from dovetail.types import Batch


@triton.jit
def _blocks(
    top, total, acc, q_tile, q_rest, low, high, k, v, k_token, v_token, place, scale,
    KEY_DIM: tl.constexpr, BLOCK_K: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend to keys ``[low, high)``. Unless MASKED, they are whole blocks that every query sees."""
    at_k, at_r, at_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_REST), tl.arange(0, BLOCK_V)
    for start in range(low, high, KEYS):
        key = start + tl.arange(0, KEYS)
        inside = (key < high)[:, None]
        from_k = k + (key.to(tl.int64) * k_token)[:, None]
        from_v = v + (key.to(tl.int64) * v_token)[:, None] + at_v[None, :]
        keys = tl.load(from_k + at_k[None, :], inside, 0.0) if MASKED else tl.load(from_k + at_k[None, :])
        scores = tl.dot(q_tile, tl.trans(keys), input_precision="ieee")
        if REST:
            from_r = from_k + KEY_DIM + at_r[None, :]
            if MASKED:
                rest = tl.load(from_r, inside & (at_r < REST)[None, :], 0.0)
            elif REST != BLOCK_REST:
                rest = tl.load(from_r, (at_r < REST)[None, :], 0.0)
            else:
                rest = tl.load(from_r)
            scores = tl.dot(q_rest, tl.trans(rest), scores, input_precision="ieee")
        scores *= scale
        if MASKED:
            scores = tl.where((key < high)[None, :] & (key[None, :] <= place[:, None]), scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        if MASKED:
            values = tl.load(from_v, inside & (at_v < VALUE_DIM)[None, :], 0.0)
        elif VALUE_DIM != BLOCK_V:
            values = tl.load(from_v, (at_v < VALUE_DIM)[None, :], 0.0)
        else:
            values = tl.load(from_v)
        acc = tl.dot(weights.to(q_tile.dtype), values, acc * shrink[:, None], input_precision="ieee")
        top = higher
    return top, total, acc


@triton.jit(do_not_specialize_on_alignment=["firsts"])
def _expanded(
    q, k, v, out, partial, lse, records, count, firsts, q_token, q_head, k_token, k_head, v_token, v_head, scale,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, BLOCK_K: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, RECORD: tl.constexpr,
    LEADS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    if PDL:
        if LEADS:  # in this order, so that the schedule is complete before the next kernel starts
            gdc_wait()
        gdc_launch_dependents()
        if not LEADS:
            gdc_wait()
    item, head = tl.program_id(0), tl.program_id(1)
    if item >= tl.load(count, cache_modifier=".cg"):
        return
    record = records + item * RECORD
    entry, first_m = tl.load(record, cache_modifier=".cg"), tl.load(record + 1, cache_modifier=".cg")
    low, high = tl.load(record + 2, cache_modifier=".cg"), tl.load(record + 3, cache_modifier=".cg")
    first_query, queries = tl.load(record + 4, cache_modifier=".cg"), tl.load(record + 5, cache_modifier=".cg")
    length, base = tl.load(record + 6, cache_modifier=".cg"), tl.load(record + 7, cache_modifier=".cg")
    first_key = tl.load(firsts + entry).to(tl.int64)
    k += first_key * k_token + head * k_head
    v += first_key * v_token + head * v_head

    m = first_m + tl.arange(0, ROWS)
    real = m < queries
    token = (first_query + m).to(tl.int64)
    at_k, at_r, at_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_REST), tl.arange(0, BLOCK_V)
    from_q = q + (token * q_token + head * q_head)[:, None]
    q_tile = tl.load(from_q + at_k[None, :], real[:, None], 0.0)
    q_rest = q_tile
    if REST:
        q_rest = tl.load(from_q + KEY_DIM + at_r[None, :], real[:, None] & (at_r < REST)[None, :], 0.0)
    place = length - queries + m
    free = tl.minimum(high, length - queries + first_m + 1)
    middle = low + tl.maximum(free - low, 0) // KEYS * KEYS
    top = tl.full([ROWS], -1e30, tl.float32)  # finite, so that rows that see no key do not become NaN
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_V], tl.float32)
    top, total, acc = _blocks(
        top, total, acc, q_tile, q_rest, low, middle, k, v, k_token, v_token, place, scale,
        KEY_DIM, BLOCK_K, REST, BLOCK_REST, VALUE_DIM, BLOCK_V, KEYS, False,
    )  # fmt: skip
    top, total, acc = _blocks(
        top, total, acc, q_tile, q_rest, middle, high, k, v, k_token, v_token, place, scale,
        KEY_DIM, BLOCK_K, REST, BLOCK_REST, VALUE_DIM, BLOCK_V, KEYS, True,
    )  # fmt: skip

    sum_or_1 = tl.where(total > 0, total, 1.0)
    result = acc / sum_or_1[:, None]
    mask = real[:, None] & (at_v < VALUE_DIM)[None, :]
    if base < 0:
        to = out + (token * HEADS + head)[:, None] * VALUE_DIM + at_v[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask)
    else:
        row = (base + m).to(tl.int64) * HEADS + head
        tl.store(lse + row, tl.where(total > 0, top + tl.log2(sum_or_1), float("-inf")), real)
        tl.store(partial + row[:, None] * VALUE_DIM + at_v[None, :], result, mask)


class ExpandedPrompts:
    """Attend in the prompts of one step, for all of its layers. ``kv_indptr`` is that of
    ``ExpandedAttention.plan_expanded``, ``processors`` the number of multiprocessors."""

    def __init__(self, batch: Batch, kv_indptr: torch.Tensor, processors: int, *, large_memory: bool) -> None:
        self._batch, self._kv_indptr, self._tokens = batch, kv_indptr, int(batch.extend_lens.sum())
        self._processors, self._large_memory = processors, large_memory
        self._made: tuple[ScheduleEntries, Schedule, PartialResults] | None = None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """See ``ExpandedAttention.forward_expanded``. The first call makes the schedule."""
        out = q.new_empty(*q.shape[:2], v.shape[2])
        leads = self._made is None
        entries, schedule, partial = self._made = self._made or self._make(q, v)
        attend_expanded(q, k, v, entries, schedule, scale, out, partial, leads=leads)
        if entries.slots:
            merge(out, range(self._tokens), [(schedule, partial)], None)
        return out

    def _make(self, q: torch.Tensor, v: torch.Tensor) -> tuple[ScheduleEntries, Schedule, PartialResults]:
        """Make the schedule. Keys are cut only if the tiles do not keep the device busy."""
        batch, heads = self._batch, q.shape[1]
        queries = batch.extend_lens
        tile = tiles.choose_expanded(int(queries.max()), q.dtype, large_memory=self._large_memory)
        count = int((-(-queries // tile.rows)).sum())
        busy = count * heads >= tile.resident * self._processors
        slots = 0 if busy else tiles.slots(tile, self._processors, heads)
        entries = ScheduleEntries(batch.qo_indptr, batch.kv_lens, self._kv_indptr, tile, slots, count + slots)
        schedule = Schedule.empty(count + slots, self._tokens, q.device)
        rows = self._tokens + slots * tile.rows if slots else 1
        fill(schedule, entries, 1, None, partial=False)
        return entries, schedule, PartialResults.empty(rows, heads, v.shape[2], q.device)


def attend_expanded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    entries: ScheduleEntries,
    schedule: Schedule,
    scale: float,
    out: torch.Tensor,
    partial: PartialResults,
    *,
    leads: bool,
) -> None:
    """Fill the rows of ``out [tokens, heads, value_dim]`` and ``partial`` that the schedule names, with the attention of
    ``q [tokens, heads, d]`` over ``k [keys, heads, d]`` and ``v [keys, heads, value_dim]``. Entry e has the keys from
    ``entries.table[e]`` on. Logits are multiplied by ``scale``. For ``leads`` see ``attend``."""
    heads, size = q.shape[1:]
    first = 1 << (size.bit_length() - 1)
    assert first >= tiles.LEAST_ROWS
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1
    assert out.is_contiguous()
    tile = entries.tile
    launch(
        _expanded, (entries.programs, heads),
        q, k, v, out, *partial, schedule.records, schedule.count, entries.table, q.stride(0), q.stride(1),
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), scale * LOG2_E,
        HEADS=heads, KEY_DIM=first, BLOCK_K=first, REST=size - first, BLOCK_REST=block(size - first),
        VALUE_DIM=v.shape[2], BLOCK_V=block(v.shape[2]), ROWS=tile.rows, KEYS=tile.keys, RECORD=RECORD, LEADS=leads,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
