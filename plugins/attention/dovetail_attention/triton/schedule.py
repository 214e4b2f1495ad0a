"""Compute on the device, from lengths, which program does what: a list of items for all layers of a step that have one
window.

An entry is consecutive queries that read the same keys: a row, or the rows of a group with the prefix that they share.
Its pairs of a query and a head (m = query * GROUP + head) are cut into tiles, and its keys into chunks where that keeps
more processors busy. An item is one tile with one chunk. The result of a chunk for pair m is row
``base + chunk * stride + m`` of the partial results; the result of a single chunk is written to the output instead.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.sizes import next_power_of_2
from dovetail_attention.triton.tiles import AttentionTile

RECORD = 8  # entry, first m, first key, end of keys, first query, queries, keys of the entry, base or -1
TOKEN = 4  # base, stride, chunks, unused
BLOCK = 64
LEAST_ENTRIES = 32
"""The least number of entries that a program reads: one for each lane of a warp. Steps of up to this number of rows
share a kernel, so that none is compiled when another number of prompts arrives."""


class Schedule(NamedTuple):
    """Hold the items of a step. ``fill`` writes them; ``attend`` and ``merge`` read them."""

    records: torch.Tensor  # int32 [items, RECORD]
    count: torch.Tensor  # int32 [1] items
    tokens: torch.Tensor  # int32 [tokens, TOKEN] the location of the partial results of each query
    span_starts: torch.Tensor  # int32 [items + 1] the first chunk of each span (see ``ScheduleEntries.level``)

    @classmethod
    def empty(cls, items: int, tokens: int, device: torch.device) -> Schedule:
        """Allocate memory for a schedule of ``items`` items and ``tokens`` queries."""
        sizes = items * RECORD, RECORD, tokens * TOKEN, items + 1
        records, count, places, starts = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
        return cls(records.view(items, RECORD), count[:1], places.view(tokens, TOKEN), starts)


class ScheduleEntries(NamedTuple):
    """Describe the entries of a launch: entry e has queries ``[indptr[e], indptr[e + 1])`` and ``kv_lens[e]`` keys in
    ``table[e]``.

    With ``causal`` the queries are the last of those keys; otherwise they come after all of them, and for layers with a
    window ``first_positions [entries]`` has the least position of each entry's queries. With a ``tree``
    (uint8 ``[tokens, w]``, see ``AttentionBackend.plan``), windows count depths.

    Keys are cut into chunks such that there are work items for ``slots`` programs per key head; with 0 ``slots`` they
    are not cut. ``programs`` programs are started for each key head. ``fewer`` means that there may be more items than
    programs; programs then compute several items. If ``chunk`` is set, which must be a multiple of the tile's keys,
    every chunk has that many keys, counted from the first key of a row, and ``slots`` only decides whether each chunk
    is a separate item.

    With ``level``, programs do equal work: the blocks of keys of all entries, one entry after the other, are cut into
    ``slots`` spans of equal length, and for each tile one program computes all items of a span. All entries must then
    have the same number of tiles, one or more for each query's heads, and ``programs`` is ``slots`` times this number.
    """

    indptr: torch.Tensor
    kv_lens: torch.Tensor
    table: torch.Tensor
    tile: AttentionTile
    slots: int
    programs: int
    fewer: bool = False
    causal: bool = True
    first_positions: torch.Tensor | None = None
    tree: torch.Tensor | None = None
    chunk: int = 0
    level: bool = False


@triton.jit
def _pick(values, at, entry):
    return tl.sum(tl.where(at == entry, values, 0), 0)


@triton.jit
def _before(values, at, entry):
    return tl.sum(tl.where(at < entry, values, 0), 0)


@triton.jit
def _end_spans(span_starts, used, slots, chunks, BLOCK: tl.constexpr) -> None:
    """Write the ends of the last span and of the spans in which there is no work."""
    for i in range(used, slots + 1, BLOCK):
        span = i + tl.arange(0, BLOCK)
        tl.store(span_starts + span, tl.zeros_like(span) + chunks, span <= slots)


@triton.jit(
    do_not_specialize=["entries", "slots", "window"],
    do_not_specialize_on_alignment=["indptr", "kv_lens", "first_positions"],
)
def _schedule(
    indptr, kv_lens, first_positions, records, count, tokens, span_starts, entries, slots, window,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, TREE: tl.constexpr, WINDOW: tl.constexpr, PARTIAL: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr, LEVEL: tl.constexpr, ENTRIES: tl.constexpr, RECORD: tl.constexpr, TOKEN: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    entry = tl.program_id(0)
    at = tl.arange(0, ENTRIES)
    real = at < entries
    starts = tl.load(indptr + at, real, 0)
    queries = tl.load(indptr + at + 1, real, 0) - starts
    lens = tl.load(kv_lens + at, real, 0)
    first_key = tl.zeros_like(lens)
    if WINDOW:
        first_place = lens - queries if CAUSAL else tl.load(first_positions + at, real, 0)
        first_key = tl.maximum(first_place + 1 - window, 0)
        if CHUNK:
            first_key = first_key // CHUNK * CHUNK
    spans = tl.where(queries > 0, tl.maximum(lens - first_key, 0), 0)
    tiles = (queries * GROUP + ROWS - 1) // ROWS
    sizes = tl.maximum(spans, 1)
    if CHUNK:
        sizes = tl.where(slots > 0, CHUNK, sizes)
    elif slots > 0 and not LEVEL:
        chunk = tl.maximum((tl.sum(tiles * spans, 0) + slots - 1) // slots, KEYS)
        wanted = tl.maximum((spans + chunk - 1) // chunk, 1)
        sizes = tl.maximum(((spans + wanted - 1) // wanted + KEYS - 1) // KEYS * KEYS, 1)
    chunks = (spans + sizes - 1) // sizes
    blocks = (spans + KEYS - 1) // KEYS
    block_starts = tl.cumsum(blocks, 0) - blocks
    length = 1  # of each span, in blocks
    if LEVEL:
        length = tl.maximum((tl.sum(blocks, 0) + slots - 1) // slots, 1)
        chunks = tl.where(blocks > 0, (block_starts + blocks - 1) // length - block_starts // length + 1, 0)
    items = tiles * chunks
    if entry == 0:
        tl.store(count, tl.sum(items, 0))

    queries_e, tiles_e, chunks_e = _pick(queries, at, entry), _pick(tiles, at, entry), _pick(chunks, at, entry)
    start_e, len_e, size_e = _pick(starts, at, entry), _pick(lens, at, entry), _pick(sizes, at, entry)
    first_e = _pick(first_key, at, entry)
    base_e = _before(queries * GROUP * chunks, at, entry)
    first_item = _before(items, at, entry)
    block_e = _pick(block_starts, at, entry)
    first_span = block_e // length
    if LEVEL:
        if entry == 0:
            _end_spans(span_starts, (tl.sum(blocks, 0) + length - 1) // length, slots, tl.sum(chunks, 0), BLOCK)
        first_chunk = _before(chunks, at, entry)
        begun = tl.where(block_e % length > 0, 1, 0)  # by the entry before
        for i in range(0, chunks_e, BLOCK):
            part = i + tl.arange(0, BLOCK)
            tl.store(span_starts + first_span + part, first_chunk + part, (part >= begun) & (part < chunks_e))
    pairs = queries_e * GROUP
    for i in range(0, tiles_e * chunks_e, BLOCK):
        item = i + tl.arange(0, BLOCK)
        inside = item < tiles_e * chunks_e
        part = item // tl.maximum(tiles_e, 1)
        m = (tiles_e - 1 - item % tl.maximum(tiles_e, 1)) * ROWS  # tiles that see the most keys come first
        if LEVEL:
            low = first_e + tl.maximum((first_span + part) * length - block_e, 0) * KEYS
            high = tl.minimum(first_e + ((first_span + part + 1) * length - block_e) * KEYS, len_e)
        else:
            low = first_e + part * size_e
            high = tl.minimum(low + size_e, len_e)
        if CAUSAL and not TREE:  # a tree mask may let a query see later keys
            prefix = len_e - queries_e
            high = tl.minimum(high, prefix + (tl.minimum(m + ROWS, pairs) - 1) // GROUP + 1)
            if WINDOW:
                seen = prefix + m // GROUP + 1 - window
                if CHUNK:
                    seen = seen // KEYS * KEYS
                low = tl.maximum(low, seen)
        base = base_e + part * pairs
        if not PARTIAL:
            base = tl.where(chunks_e == 1, -1, base)
        to = records + (first_item + item) * RECORD
        tl.store(to, tl.zeros_like(item) + entry, inside)
        tl.store(to + 1, m, inside)
        tl.store(to + 2, low, inside)
        tl.store(to + 3, high, inside)
        tl.store(to + 4, tl.zeros_like(item) + start_e, inside)
        tl.store(to + 5, tl.zeros_like(item) + queries_e, inside)
        tl.store(to + 6, tl.zeros_like(item) + len_e, inside)
        tl.store(to + 7, base, inside)
    for i in range(0, queries_e, BLOCK):
        query = i + tl.arange(0, BLOCK)
        inside = query < queries_e
        to = tokens + (start_e + query) * TOKEN
        tl.store(to, base_e + query * GROUP, inside)
        tl.store(to + 1, tl.zeros_like(query) + pairs, inside)
        tl.store(to + 2, tl.zeros_like(query) + chunks_e, inside)


def fill(schedule: Schedule, entries: ScheduleEntries, group: int, window: int | None, *, partial: bool) -> None:
    """Write the schedule of ``entries`` with ``group`` query heads per key head. Mutates ``schedule``.

    With ``partial``, the results of single chunks become partial results too.
    """
    count = len(entries.kv_lens)
    first_positions = entries.kv_lens if entries.causal or window is None else entries.first_positions
    assert first_positions is not None, "layers with a window read shared keys of a sliding cache group"
    launch(
        _schedule, (count,),
        entries.indptr, entries.kv_lens, first_positions, *schedule, count, entries.slots, window or 0,
        GROUP=group, CAUSAL=entries.causal, TREE=entries.tree is not None, WINDOW=window is not None, PARTIAL=partial,
        ROWS=entries.tile.rows, KEYS=entries.tile.keys, CHUNK=entries.chunk, LEVEL=entries.level, ENTRIES=max(LEAST_ENTRIES, next_power_of_2(count)), RECORD=RECORD, TOKEN=TOKEN,
        BLOCK=BLOCK,
    )  # fmt: skip
