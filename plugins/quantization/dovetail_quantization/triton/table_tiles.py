"""Choose how products with weights of ``table_weights`` are divided: those that were the fastest for the sizes of an 8B model on an H200, of about ten
for each number of rows."""

from __future__ import annotations

from dovetail.ops.integers import PLANES
from dovetail.ops.triton.sizes import next_power_of_2
from dovetail.ops.triton.tuning import MAX_PARTS, MAX_TILES
from dovetail_quantization.triton.integer_rows import IntegerTile
from dovetail_quantization.triton.one_row import OneRowTile, parts_of

MOST_ROWS = 128
"""Up to this number of rows of 16 bits the kernels of few rows are used."""
FEWER_ROWS = 64
"""The same where tiles of more rows would spill registers: for float32, and for blocks of less than 64 columns."""
_WIDE = 6144
"""From this number of rows of a weight on, a tile of up to 16 rows of activations has 128 of them."""


def one_row_tile(n: int, k: int, *, in_parts: bool = False) -> OneRowTile | None:
    """Return the tile of one row and a weight ``[n, k]``, or None if there is none. ``in_parts``: it divides the columns."""
    split = parts_of(k, in_parts=in_parts)
    if not n or split is None:
        return None
    block_k = max(next_power_of_2(k // split), 1024)
    warps = max(1, min(16, block_k // 512))
    if in_parts:
        return OneRowTile(8, block_k, warps, 6, split)
    return OneRowTile(4 if block_k > 8192 else 8, block_k, warps, max(1, 16 // warps), split)


def few_rows_tile(rows: int, n: int, k: int) -> IntegerTile:
    """Return the tile of several rows and a weight ``[n, k]``, where ``k`` is a multiple of ``PLANES``."""
    block_m = next(size for size in (16, 32, 64, 128) if rows <= size)
    block_n, block_k, programs = 64, PLANES, {16: 384, 32: 384, 64: 256, 128: 192}[block_m]
    stages = 3 if block_m == 128 else 4
    if block_m == 16 and n >= _WIDE:
        block_n = 128
    elif block_m == 16 and k % (2 * PLANES) == 0:
        block_k, stages = 2 * PLANES, 3
    tiles, split = -(-n // block_n), 1
    while split < 8 and k % (2 * split * block_k) == 0 and tiles * split < programs:
        split *= 2
    if split > 1 and (tiles * split * block_n * block_m > MAX_PARTS or tiles > MAX_TILES):
        split = 1
    return IntegerTile(block_m, block_n, block_k, 4, stages, split)
