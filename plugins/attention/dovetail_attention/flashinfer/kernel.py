"""Define the one Triton kernel that prepares the inputs of FlashInfer's kernels. Imported on CUDA only."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gather_pages(table, stride, indptr, out, BLOCK: tl.constexpr) -> None:
    """Do what ``pages.gather`` does. Grid: rows, blocks that take turns along a row."""
    row = tl.program_id(0)
    begin = tl.load(indptr + row)
    count = tl.load(indptr + row + 1) - begin
    source = table + row.to(tl.int64) * stride
    for first in range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
        column = first + tl.arange(0, BLOCK)
        pages = tl.load(source + column, mask=column < count)
        tl.store(out + begin + column, pages, mask=column < count)
