"""The one kernel of our own that FlashInfer's are prepared with. Imported on CUDA only."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gather_pages(table, stride, indptr, out, BLOCK: tl.constexpr) -> None:
    """See ``pages.gather``. Grid: rows, blocks of the longest row."""
    row = tl.program_id(0)
    begin = tl.load(indptr + row)
    count = tl.load(indptr + row + 1) - begin
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pages = tl.load(table + row.to(tl.int64) * stride + column, mask=column < count)
    tl.store(out + begin + column, pages, mask=column < count)
