"""Compute the inputs of a step from slots, on the device: the host sends only slot numbers, lengths and drafts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.ops.triton.sizes import cdiv, next_power_of_2

BLOCK = 256


@triton.jit
def _copy_pages(source, target, first, count, BLOCK: tl.constexpr):
    for start in range(0, count, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < count
        tl.store(target + column, tl.load(source + first + column, mask=inside, other=0), mask=inside)


@triton.jit(
    do_not_specialize_on_alignment=[
        "slots",
        "prefix_lens",
        "last_token",
        "input_ids",
        "positions",
        "out_loc",
        "kv_lens",
        "row_lens",
        "indptr",
        "group_lens",
        "own_lens",
        "first_positions",
    ]
)
def _decode_inputs(
    slots,
    prefix_lens,
    last_token,
    page_table,
    page_table_stride,
    input_ids,
    positions,
    out_loc,
    kv_lens,
    table,
    table_stride,
    row_lens,
    indptr,
    group_lens,
    group_table,
    own_lens,
    first_positions,
    PAGE: tl.constexpr,
    SHARED: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    position = tl.load(prefix_lens + row)
    pages = page_table + slot * page_table_stride
    page = tl.load(pages + position // PAGE)
    tl.store(input_ids + row, tl.load(last_token + slot))
    tl.store(positions + row, position.to(tl.int64))
    tl.store(out_loc + row, page.to(tl.int64) * PAGE + position % PAGE)
    tl.store(kv_lens + row, position + 1)
    target = table + row.to(tl.int64) * table_stride
    if SHARED:
        shared = tl.load(row_lens + row)
        tl.store(own_lens + row, position + 1 - shared)
        _copy_pages(pages, target, shared // PAGE, position // PAGE + 1 - shared // PAGE, BLOCK)
        length = tl.load(group_lens + row)  # the program of row g also serves group g
        if length > 0:
            begin = tl.load(indptr + row)
            source = begin
            if WINDOW:  # only the shortest row still has all pages that rows of the group see
                end, least = tl.load(indptr + row + 1), position * 0 + 2147483647
                for at in range(begin, end, BLOCK):
                    member = at + tl.arange(0, BLOCK)
                    places = tl.load(prefix_lens + member, member < end, 2147483647)
                    found = tl.min(places, 0)
                    source = tl.where(found < least, at + tl.argmin(places, 0), source)
                    least = tl.minimum(found, least)
                tl.store(first_positions + row, least)
            leader = tl.load(slots + source)
            leader_pages = page_table + leader * page_table_stride
            _copy_pages(leader_pages, group_table + row.to(tl.int64) * table_stride, 0, length // PAGE, BLOCK)
    else:
        _copy_pages(pages, target, 0, position // PAGE + 1, BLOCK)


def decode_inputs(
    slots: torch.Tensor,
    prefix_lens: torch.Tensor,
    last_token: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    shared: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    first_positions: torch.Tensor | None = None,
) -> None:
    """Fill ``out`` = (input_ids, positions, out_loc int64 ``[rows]``, kv_lens int32 ``[rows]``, table int32 ``[rows, >=
    pages]``).

    Row r continues the request of slot ``slots[r]`` (int64), which has ``prefix_lens[r]`` (int32) tokens in the pool,
    with its entry of ``last_token [slots]``. ``page_table [slots, pages]`` holds the pages of every slot; only the
    columns in use are copied from its rows. With ``shared`` = (row_lens, indptr, group_lens, group_table, own_lens)
    (see ``types.SharedPrefixes``; ``row_lens [rows]`` is the shared length of each row), ``table`` gets only the pages
    after the shared ones. ``first_positions`` is given too if the layers have a window.
    """
    input_ids, positions, out_loc, kv_lens, table = out
    row_lens, indptr, group_lens, group_table, own_lens = shared or (kv_lens, kv_lens, kv_lens, table, kv_lens)
    assert group_table.stride(0) == table.stride(0)
    _decode_inputs[(slots.shape[0],)](
        slots,
        prefix_lens,
        last_token,
        page_table,
        page_table.stride(0),
        input_ids,
        positions,
        out_loc,
        kv_lens,
        table,
        table.stride(0),
        row_lens,
        indptr,
        group_lens,
        group_table,
        own_lens,
        kv_lens if first_positions is None else first_positions,
        PAGE=page_size,
        SHARED=shared is not None,
        WINDOW=first_positions is not None,
        BLOCK=BLOCK,
        num_warps=4,
    )


@triton.jit
def _fetch(source, target, size, capacity, pages, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, at < size), at < size)
    new = at < tl.load(source + size)
    place = tl.load(source + size + 1 + at, new, 0)
    tl.store(pages + place, tl.load(source + size + 1 + capacity + at, new, 0), new)


def fetch(source: torch.Tensor, target: torch.Tensor, capacity: int, page_table: torch.Tensor) -> None:
    """Copy from pinned memory. The beginning of ``source`` (int32) is copied to all of ``target``. After it, ``source``
    holds new entries of ``page_table``: their number, their flat indices ``[capacity]``, and their pages
    ``[capacity]``.
    """
    size = target.shape[0]
    programs = cdiv(max(size, capacity), BLOCK)
    _fetch[(programs,)](source, target, size, capacity, page_table, BLOCK=BLOCK, num_warps=4)


@triton.jit
def _verify_inputs(
    num_rows,
    slots,
    prefix_lens,
    counts,
    drafts,
    parents,
    drafts_stride,
    last_token,
    page_table,
    page_table_stride,
    input_ids,
    positions,
    out_loc,
    row_of,
    indptr,
    row_slots,
    kv_lens,
    table,
    table_stride,
    mask,
    mask_stride,
    tokens,
    PAGE: tl.constexpr,
    TREE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rows, others = tl.load(num_rows), tl.arange(0, ROWS)
    queries = tl.load(counts + others, others < rows, 0)
    real_row = row < rows
    fills = row - rows + tl.sum(queries, 0)  # the index of this row's token if the row pads the step
    start = tl.where(real_row, tl.sum(tl.where(others < row, queries, 0), 0), tl.minimum(fills, tokens)).to(tl.int32)
    count = tl.where(real_row, tl.load(counts + row), tl.where(fills < tokens, 1, 0))
    slot = tl.where(real_row, tl.load(slots + row), 0)
    prefix = tl.where(real_row, tl.load(prefix_lens + row), 0)
    kv_len = tl.where(real_row, prefix + count, 1)
    tl.store(indptr + row + 1, start + count)
    tl.store(indptr, 0, row == 0)
    tl.store(row_slots + row, slot)
    tl.store(kv_lens + row, kv_len)
    pages = page_table + slot * page_table_stride
    node = tl.arange(0, WIDTH)
    real = node < count
    place = prefix + node
    own = row * drafts_stride + node - 1  # the index of the node's draft; the root has none
    token = start + node
    depth = node
    if TREE:
        column = tl.arange(0, WIDTH)
        cells = mask + token[:, None] * mask_stride + column
        tl.store(cells, tl.zeros((WIDTH, WIDTH), tl.int8), real[:, None] & (column < mask_stride))
        tl.debug_barrier()
        at, depth = node, node * 0
        for _ in range(WIDTH):
            tl.store(mask + token * mask_stride + at, (node * 0 + 1).to(tl.int8), real)
            below = real & (at > 0)
            depth += below.to(tl.int32)
            at = tl.where(below, tl.load(parents + row * drafts_stride + at - 1, below, -1) + 1, 0)
    drafted = tl.load(drafts + own, real & (node > 0), 0)
    ids = tl.where(node == 0, tl.load(last_token + slot), drafted.to(tl.int64))
    page = tl.load(pages + place // PAGE, real, 0)
    tl.store(input_ids + token, ids, real)
    tl.store(positions + token, (prefix + depth).to(tl.int64), real)
    tl.store(out_loc + token, page.to(tl.int64) * PAGE + place % PAGE, real)
    tl.store(row_of + token, row, real)
    _copy_pages(pages, table + row * table_stride, 0, (kv_len - 1) // PAGE + 1, BLOCK)


def verify_inputs(
    sent: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
    last_token: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    of_tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    of_rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
) -> None:
    """Fill the inputs of a step with verify rows.

    The outputs are ``of_tokens`` = (input_ids, positions, out_loc, row_of: int64 ``[tokens]``), ``of_rows`` = (indptr
    ``[tokens + 1]``, slots, kv_lens ``[tokens]``, table ``[tokens, >= pages]``: int32), and for trees ``mask``, uint8
    ``[tokens, most queries of a row]`` (see ``AttentionBackend.plan``).

    ``sent`` = (number of rows ``[1]``, slots, prefix_lens, counts ``[tokens]``, drafts, parents ``[tokens, most
    drafts]``), int32. Row r has ``counts[r]`` tokens after the ``prefix_lens[r]`` tokens in the pool: the last token of
    slot ``slots[r]``, which is in ``last_token [slots]``, and its drafts with their ``parents`` (see
    ``types.DraftTree``; None: chains). Each token that these rows leave over becomes a row of slot 0; the remaining
    rows have no token.
    """
    num_rows, slots, prefix_lens, counts, drafts, parents = sent
    tokens = slots.shape[0]
    _verify_inputs[(tokens,)](
        num_rows,
        slots,
        prefix_lens,
        counts,
        drafts,
        drafts if parents is None else parents,
        drafts.stride(0),
        last_token,
        page_table,
        page_table.stride(0),
        *of_tokens,
        *of_rows,
        of_rows[-1].stride(0),
        counts if mask is None else mask,
        0 if mask is None else mask.stride(0),
        tokens,
        PAGE=page_size,
        TREE=mask is not None,
        ROWS=next_power_of_2(tokens),
        WIDTH=next_power_of_2(drafts.shape[1] + 1),
        BLOCK=BLOCK,
        num_warps=4,
    )
