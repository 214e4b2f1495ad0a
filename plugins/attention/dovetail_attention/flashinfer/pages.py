"""The pages of a batch's rows one behind the other, as FlashInfer wants them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from dovetail.types import IntArray

BLOCK = 256
BLOCKS_PER_ROW = 8


class PageRows(NamedTuple):
    """Row r has pages ``indices[indptr[r]:indptr[r + 1]]`` and ``kv_lens[r]`` tokens, ``last_page_len[r]`` of them in its
    last page. int32; ``indices`` on the device, the others in host memory from which copies need not be waited for."""

    indptr: torch.Tensor  # [rows + 1]
    last_page_len: torch.Tensor  # [rows]
    kv_lens: torch.Tensor  # [rows]
    indices: torch.Tensor  # [indptr[-1]]


def count_pages(kv_lens: IntArray, page_size: int) -> tuple[IntArray, IntArray]:
    """``indptr`` and ``last_page_len`` of ``PageRows``."""
    indptr = np.zeros(len(kv_lens) + 1, np.int32)
    np.cumsum(-(-kv_lens // page_size), out=indptr[1:])
    return indptr, ((kv_lens - 1) % page_size + 1).astype(np.int32)


def pinned(array: IntArray, device: torch.device) -> torch.Tensor:
    """``array`` in host memory that ``device`` can copy from while the host goes on."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory()


def make_rows(kv_lens: IntArray, table: torch.Tensor, page_size: int) -> PageRows:
    """Of rows of ``kv_lens`` tokens with pages ``table [rows, >= pages]``."""
    indptr, last_page_len = count_pages(kv_lens, page_size)
    device = table.device
    host = pinned(indptr, device)
    indices = torch.empty(int(indptr[-1]), dtype=torch.int32, device=device)
    gather(table, host.to(device, non_blocking=True), indices)
    return PageRows(host, pinned(last_page_len, device), pinned(kv_lens.astype(np.int32), device), indices)


def gather(table: torch.Tensor, indptr: torch.Tensor, out: torch.Tensor) -> None:
    """Write the first ``indptr[r + 1] - indptr[r]`` pages of each row of ``table`` to ``out``, from ``indptr[r]`` on. All on
    the device, nothing waits. Mutates ``out``."""
    if table.device.type == "cpu":
        kept = torch.arange(table.shape[1]) < indptr.diff()[:, None]
        out[: int(indptr[-1])] = table[kept]
        return
    from dovetail_attention.flashinfer import kernel

    gather_pages: Any = kernel.gather_pages
    gather_pages[(len(table), BLOCKS_PER_ROW)](table, table.stride(0), indptr, out, BLOCK)
