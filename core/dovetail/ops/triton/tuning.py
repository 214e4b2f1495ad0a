"""How the products of few rows are cut, as measured by ``benchmarks/tune_matmul.py``."""

from __future__ import annotations

from typing import NamedTuple

MAX_ROWS = 128
"""Rows up to which the kernels are asked; from there on torch's product is the faster one."""
MAX_PARTS = 1 << 22
"""float32 numbers in the workspace of split products: parts of a tile times tiles times their rows and columns."""
MAX_TILES = 1 << 14
"""Tiles of a split product."""


BUCKETS = (1, 16, 32, 64, MAX_ROWS)
"""A product of so many rows is cut as the next of these is."""


class ProductTile(NamedTuple):
    """How a product is cut. ``block_m`` 1 is the kernel of one row, which has no stages and no split. ``ahead``: lines of 128
    bytes per row of the weight to ask for before waiting for the kernel before (a power of two, or 0). ``per_sm``: programs per
    multiprocessor, each of several tiles, for the kernel of one row; 0: one program per tile. ``early``, of several
    rows: the weights of all stages but one are loaded before that wait. It gained where two or three programs fit a
    multiprocessor, so that some may come before others have ended; the tiles of more than 16 rows were slower with it."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int = 1
    split: int = 1
    ahead: int = 0
    per_sm: int = 0
    early: bool = False


MEASURED: dict[tuple[int, int], dict[int, ProductTile | None]] = {
    (6144, 4096): {
        1: ProductTile(1, 2, 2048, 4, ahead=8, per_sm=6),
        16: ProductTile(16, 64, 256, 4, 3, split=2, early=True),
        32: ProductTile(32, 64, 128, 4, 6, ahead=8),
        64: ProductTile(64, 64, 64, 4, 8, ahead=8),
    },
    (4096, 4096): {
        1: ProductTile(1, 2, 1024, 4),
        16: ProductTile(16, 64, 128, 4, 4, split=4, early=True),
        32: ProductTile(32, 64, 256, 4, 3, split=2),
        64: ProductTile(64, 64, 256, 4, 3, split=2),
    },
    (28672, 4096): {
        1: ProductTile(1, 2, 2048, 4, per_sm=6),
        16: ProductTile(16, 64, 256, 4, 3, early=True),
        32: ProductTile(32, 64, 128, 4, 4),
        64: ProductTile(64, 128, 128, 8, 4),
        128: ProductTile(128, 128, 64, 8, 3),
    },
    (4096, 14336): {
        1: ProductTile(1, 2, 1024, 4),
        16: ProductTile(16, 64, 256, 4, 3, split=4, early=True),
        32: ProductTile(32, 64, 256, 4, 3, split=2),
        64: ProductTile(64, 64, 128, 4, 6, split=2),
    },
    (128256, 4096): {
        1: ProductTile(1, 1, 512, 2),
        16: ProductTile(16, 128, 128, 8, 3, early=True),
        32: ProductTile(32, 128, 128, 8, 4),
        64: ProductTile(64, 128, 128, 8, 4),
        128: ProductTile(128, 256, 64, 8, 4),
    },
    (5120, 3072): {
        1: ProductTile(1, 4, 512, 2),
        16: ProductTile(16, 64, 256, 4, 3, split=3, early=True),
        32: ProductTile(32, 64, 128, 4, 6, ahead=8),
        64: None,
    },
    (3072, 3072): {
        1: ProductTile(1, 2, 512, 2),
        16: ProductTile(16, 64, 256, 4, 3, split=4, early=True),
        32: ProductTile(32, 64, 128, 4, 6, split=2),
        64: None,
    },
    (16384, 3072): {
        1: ProductTile(1, 4, 1024, 2, per_sm=8),
        16: ProductTile(16, 64, 256, 4, 3, early=True),
        32: ProductTile(32, 128, 128, 4, 3),
        64: ProductTile(64, 128, 128, 8, 4),
    },
    (3072, 8192): {
        1: ProductTile(1, 1, 512, 2, ahead=8),
        16: ProductTile(16, 64, 256, 4, 3, split=4, early=True),  # measured in a step whose norm adds up the parts
        32: ProductTile(32, 64, 128, 4, 6, split=2, ahead=8),
        64: ProductTile(64, 64, 256, 4, 3, split=2, ahead=8),
    },
    (128256, 3072): {
        1: ProductTile(1, 1, 512, 2),
        16: ProductTile(16, 128, 128, 8, 3, early=True),
        32: ProductTile(32, 128, 128, 8, 4),
        64: ProductTile(64, 128, 128, 8, 4),
    },
    (4096, 1024): {
        1: ProductTile(1, 4, 512, 2),
        16: ProductTile(16, 32, 256, 4, 6, ahead=8),
        32: ProductTile(32, 32, 256, 4, 6, ahead=8),
        64: None,
    },
    (1024, 2048): {
        1: ProductTile(1, 2, 2048, 4, ahead=8),
        16: ProductTile(16, 32, 256, 4, 6, split=4, early=True),
        32: ProductTile(32, 32, 256, 4, 6, split=4),
        64: ProductTile(64, 32, 256, 4, 4, split=4),
    },
    (6144, 1024): {
        1: ProductTile(1, 2, 1024, 2, ahead=8, per_sm=12),
        16: ProductTile(16, 64, 128, 4, 6),
        32: ProductTile(32, 64, 128, 4, 6),
        64: ProductTile(64, 64, 128, 4, 4, ahead=8),
    },
    (1024, 3072): {
        1: ProductTile(1, 1, 1024, 4),
        16: ProductTile(16, 32, 256, 4, 6, split=6, early=True),
        32: ProductTile(32, 32, 256, 4, 6, split=4, ahead=8),
        64: ProductTile(64, 32, 128, 4, 6, split=4, ahead=16),
    },
    (151936, 1024): {
        1: ProductTile(1, 4, 256, 1),
        16: ProductTile(16, 64, 256, 4, 2, early=True),
        32: ProductTile(32, 64, 128, 4, 4),
        64: ProductTile(64, 128, 128, 8, 4),
    },
}
"""By (n, k) of the weight, the tile for up to so many rows; None, or none, where torch's product (cuBLAS) is faster."""


def tile_of(rows: int, n: int, k: int) -> ProductTile | None:
    """The tile for ``rows`` rows and a weight ``[n, k]``; None: torch's product."""
    bucket = next(bucket for bucket in BUCKETS if rows <= bucket)
    measured = MEASURED.get((n, k))
    return guess(bucket, n, k) if measured is None else measured.get(bucket)


def guess(bucket: int, n: int, k: int) -> ProductTile | None:
    """For shapes that were not measured: one row as the others of its kind, several by torch."""
    if bucket > 1:
        return None
    warps = next((warps for warps in (4, 2, 1) if k % (256 * warps) == 0), None)
    return None if warps is None else ProductTile(1, 2 if n < 65536 else 4, 256 * warps, warps, ahead=16)


def describe(n: int, k: int) -> str:
    """The choices for a weight ``[n, k]``, for people."""
    source = "measured" if (n, k) in MEASURED else "not measured"
    choices = ((bucket, tile_of(bucket, n, k)) for bucket in BUCKETS)
    texts = [f"up to {bucket} rows {'torch' if tile is None else _text(tile)}" for bucket, tile in choices]
    return f"[{n}, {k}] {source}: {', '.join(texts)}, more torch"


def _text(tile: ProductTile) -> str:
    split = f" in {tile.split} parts" if tile.split > 1 else ""
    return f"triton {tile.block_m}x{tile.block_n}x{tile.block_k}{split}{' early' if tile.early else ''}"
