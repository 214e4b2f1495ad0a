"""List the pages of a batch's rows one after the other, in the layout of FlashInfer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from dovetail.types import IntArray

BLOCK = 256
BLOCKS_PER_ROW = 8


class PageRows(NamedTuple):
    """Hold the pages of rows: row r has the pages ``indices[indptr[r]:indptr[r + 1]]`` and ``kv_lens[r]`` tokens.

    ``last_page_len[r]`` of the tokens are in its last page. All are int32. ``indices`` is on the device; the others are
    in host memory from which the device can copy without waiting.
    """

    indptr: torch.Tensor  # [rows + 1]
    last_page_len: torch.Tensor  # [rows]
    kv_lens: torch.Tensor  # [rows]
    indices: torch.Tensor  # [indptr[-1]]


def count_pages(kv_lens: IntArray, page_size: int) -> tuple[IntArray, IntArray]:
    """Return ``indptr`` and ``last_page_len`` of ``PageRows``."""
    indptr = np.zeros(len(kv_lens) + 1, np.int32)
    np.cumsum(-(-kv_lens // page_size), out=indptr[1:])
    return indptr, ((kv_lens - 1) % page_size + 1).astype(np.int32)


def pinned(array: IntArray, device: torch.device) -> torch.Tensor:
    """Return ``array`` in host memory from which ``device`` can copy asynchronously."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory()


def make_rows(kv_lens: IntArray, table: torch.Tensor, page_size: int) -> PageRows:
    """Return the pages of rows of ``kv_lens`` tokens, whose page table is ``table [rows, >= pages]``."""
    indptr, last_page_len = count_pages(kv_lens, page_size)
    device = table.device
    host = pinned(indptr, device)
    indices = torch.empty(int(indptr[-1]), dtype=torch.int32, device=device)
    gather(table, host.to(device, non_blocking=True), indices)
    return PageRows(host, pinned(last_page_len, device), pinned(kv_lens.astype(np.int32), device), indices)


def gather(table: torch.Tensor, indptr: torch.Tensor, out: torch.Tensor) -> None:
    """Write the first ``indptr[r + 1] - indptr[r]`` pages of each row of ``table`` to ``out``, from index ``indptr[r]``
    on.

    Runs on the device without a wait. Mutates ``out``.
    """
    if table.device.type == "cpu":
        kept = torch.arange(table.shape[1]) < indptr.diff()[:, None]
        out[: int(indptr[-1])] = table[kept]
        return
    from dovetail_attention.flashinfer import kernel

    gather_pages: Any = kernel.gather_pages
    gather_pages[(len(table), BLOCKS_PER_ROW)](table, table.stride(0), indptr, out, BLOCK)
