"""From slots to the inputs of a decode step, on the device: the host sends slot numbers and lengths, nothing else."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 256


@triton.jit
def _copy_pages(source, target, first, count, BLOCK: tl.constexpr):
    for start in range(0, count, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < count
        tl.store(target + column, tl.load(source + first + column, mask=inside, other=0), mask=inside)


@triton.jit
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
    PAGE: tl.constexpr,
    SHARED: tl.constexpr,
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
            leader = tl.load(slots + tl.load(indptr + row))
            source = page_table + leader * page_table_stride
            _copy_pages(source, group_table + row.to(tl.int64) * table_stride, 0, length // PAGE, BLOCK)
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
) -> None:
    """Fill ``out`` = (input_ids, positions, out_loc int64 ``[rows]``, kv_lens int32 ``[rows]``, table int32 ``[rows, >= pages]``).

    Row r continues the request of slot ``slots[r]`` (int64), which has ``prefix_lens[r]`` (int32) tokens in the pool, with
    its ``last_token [slots]``. ``page_table [slots, pages]`` holds the pages of every slot; of its rows only the columns in
    use are copied. With ``shared`` = (row_lens, indptr, group_lens, group_table, own_lens) (see ``types.SharedPrefixes``;
    ``row_lens [rows]`` is the shared length of each row) ``table`` gets the pages behind the shared ones instead.
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
        PAGE=page_size,
        SHARED=shared is not None,
        BLOCK=BLOCK,
        num_warps=4,
    )
