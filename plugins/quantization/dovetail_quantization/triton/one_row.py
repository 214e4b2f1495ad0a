"""Divide the product of one row and a weight among programs: those of ``integer_one_row`` and of ``packed_rows``."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dovetail.ops.triton.launch import processors
from dovetail.ops.triton.sizes import cdiv
from dovetail_quantization.triton.packed_rows import PART_COLUMNS

MOST_COLUMNS = 16384
"""Up to this number of columns there is a kernel for one row, which holds a part of the row in registers."""


class OneRowTile(NamedTuple):
    """Describe how the product of one row is divided: rows of the weight of a tile, at least the columns of a part, warps of a program,
    programs of a multiprocessor, and parts of the columns."""

    block_n: int
    block_k: int
    warps: int
    per_sm: int
    split: int = 1

    def grid(self, n: int, device: torch.device) -> tuple[int, int]:
        """Return the numbers of programs for the rows of a weight with ``n`` rows, and for the parts of its columns."""
        programs = max(1, self.per_sm * processors(device) // self.split)
        return min(cdiv(n, self.block_n), programs), self.split


def split_of(k: int) -> int:
    """Return into how many parts the columns of a row are divided. Then no thread has less to do than others where the number of
    columns is no power of two."""
    return k // PART_COLUMNS if k % PART_COLUMNS == 0 else 1


def parts_of(k: int, *, in_parts: bool) -> int | None:
    """Return the parts of a row of ``k`` columns: 1, or with ``in_parts`` those into which it is divided; or None if a part is too
    long for the kernels, or if the row cannot be divided."""
    split = split_of(k) if in_parts else 1
    return None if k // split > MOST_COLUMNS or (in_parts and split == 1) else split
