"""Choose how the products of few rows are divided into tiles, as measured by ``benchmarks/tune_matmul.py``."""

from __future__ import annotations

from typing import NamedTuple

MAX_ROWS = 128
"""These kernels are used up to this number of rows; for more rows torch's product is faster."""
MAX_PARTS = 1 << 22
"""The workspace of split products has this many float32 values: parts of a tile times tiles times their rows and
columns."""
MAX_TILES = 1 << 14
"""A split product has at most this many tiles."""


BUCKETS = (1, 16, 32, 64, MAX_ROWS)
"""Tiles are stored for these numbers of rows. A product uses the tile of the smallest bucket that holds its rows."""


class ProductTile(NamedTuple):
    """Describe how a product is divided into tiles.

    ``block_m`` 1 stands for the kernel of one row, which has no stages and no split. ``ahead`` is the number of
    128-byte lines per row of the weight that are prefetched before the kernel waits for the previous kernel (a power of
    two, or 0). ``per_sm``, for the kernel of one row, is the number of programs per multiprocessor, each of which
    computes several tiles; 0 stands for one program per tile. ``early``, for several rows: the weights of all stages
    but one are loaded before that wait. This was faster where two or three programs fit on a multiprocessor, so that
    some can start before others have ended; the tiles of more than 16 rows were slower with it.
    """

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
    # Qwen3-30B-A3B, measured alone
    (2048, 4096): {
        1: ProductTile(1, 2, 1024, 4, ahead=16),
        16: ProductTile(16, 64, 128, 4, 6, split=4),
        32: ProductTile(32, 64, 128, 4, 4, split=4),
        64: ProductTile(64, 64, 128, 4, 4, split=4),
    },
    (151936, 2048): {
        1: ProductTile(1, 2, 512, 1),
        16: ProductTile(16, 64, 128, 4, 4, early=True),
        64: ProductTile(64, 128, 128, 8, 4),
    },
    # one of two ranks of 8B, measured by a step of its products and norms
    (3072, 4096): {
        1: ProductTile(1, 2, 2048, 4, ahead=8, per_sm=6),
        16: ProductTile(16, 64, 256, 4, 3, split=4, early=True),
        32: ProductTile(32, 64, 256, 4, 3, split=2),
        64: ProductTile(64, 64, 64, 4, 8, split=2),
    },
    (4096, 2048): {
        1: ProductTile(1, 2, 512, 2),
        16: ProductTile(16, 64, 256, 4, 3, split=2),
        32: ProductTile(32, 64, 256, 4, 3, split=2),
        64: ProductTile(64, 64, 64, 4, 8, split=2),
    },
    (14336, 4096): {
        1: ProductTile(1, 2, 2048, 4, ahead=8, per_sm=6),
        16: ProductTile(16, 64, 128, 4, 4),
        32: ProductTile(32, 128, 128, 8, 4),
        64: ProductTile(64, 128, 128, 8, 3),
        128: ProductTile(128, 128, 128, 8, 3),
    },
    (4096, 7168): {
        1: ProductTile(1, 2, 1024, 4),
        16: ProductTile(16, 64, 256, 4, 3, split=4, early=True),
        32: ProductTile(32, 64, 256, 4, 3, split=2),
        64: ProductTile(64, 64, 64, 4, 8, split=2),
    },
    (64128, 4096): {
        1: ProductTile(1, 1, 512, 2),
        16: ProductTile(16, 128, 128, 8, 3, early=True),
        32: ProductTile(32, 128, 128, 8, 4),
        64: ProductTile(64, 128, 128, 8, 4),
        128: ProductTile(128, 256, 64, 8, 4),
    },
    (2880, 4096): {
        1: ProductTile(1, 2, 2048, 4, per_sm=6),
        16: ProductTile(16, 64, 256, 4, 3, split=2),
        32: ProductTile(32, 64, 256, 4, 3, split=2),
    },
    (201088, 2880): {
        16: ProductTile(16, 64, 64, 4, 8),
        64: ProductTile(64, 256, 64, 8, 4),
    },
    (5120, 2048): {
        1: ProductTile(1, 4, 512, 2),
    },
    (128, 2048): {
        1: ProductTile(1, 2, 2048, 4),
    },
    (3648, 2048): {
        1: ProductTile(1, 2, 2048, 4, per_sm=6),
        16: ProductTile(16, 64, 256, 4, 3, split=2),
    },
    (2048, 2048): {
        1: ProductTile(1, 2, 1024, 4),
        16: ProductTile(16, 64, 128, 4, 6, split=4),
    },
    (21888, 2048): {
        1: ProductTile(1, 2, 1024, 2, per_sm=12),
        16: ProductTile(16, 64, 128, 4, 4),
    },
    (5632, 2048): {
        1: ProductTile(1, 2, 2048, 4, per_sm=6),
        16: ProductTile(16, 64, 128, 4, 4),
        32: ProductTile(32, 64, 128, 4, 4),
        64: ProductTile(64, 64, 64, 4, 8),
    },
    (102400, 2048): {
        1: ProductTile(1, 4, 256, 1),
        16: ProductTile(16, 64, 128, 4, 4),
        32: ProductTile(32, 64, 128, 4, 4),
    },
    (12288, 2048): {
        1: ProductTile(1, 4, 1024, 2, per_sm=8),
        32: ProductTile(32, 128, 128, 4, 3),
    },
    (64, 2048): {
        1: ProductTile(1, 2, 2048, 4),
    },
    (512, 2048): {
        1: ProductTile(1, 2, 2048, 4),
    },
    (2048, 512): {
        1: ProductTile(1, 4, 512, 2),
        16: ProductTile(16, 64, 128, 4, 6, split=4),
    },
    (9216, 2048): {
        1: ProductTile(1, 4, 256, 1),
    },
    (4096, 2560): {
        1: ProductTile(1, 4, 512, 2),
        16: ProductTile(16, 64, 256, 4, 3, split=2),
    },
    (2560, 2048): {
        1: ProductTile(1, 4, 1024, 4),
    },
    (20480, 2560): {
        1: ProductTile(1, 4, 256, 1),
        16: ProductTile(16, 64, 128, 4, 6),
        32: ProductTile(32, 64, 128, 4, 6),
    },
    (2560, 10240): {
        1: ProductTile(1, 4, 1024, 4),
    },
}
"""Map (n, k) of the weight and a number of rows to the tile for up to that many rows. If the entry is None or missing,
torch's product (cuBLAS) is faster."""


def tile_of(rows: int, n: int, k: int) -> ProductTile | None:
    """Return the tile for ``rows`` rows and a weight ``[n, k]``, or None for torch's product."""
    bucket = next(bucket for bucket in BUCKETS if rows <= bucket)
    measured = MEASURED.get((n, k))
    return guess(bucket, n, k) if measured is None else measured.get(bucket)


def guess(bucket: int, n: int, k: int) -> ProductTile | None:
    """Return a tile for shapes that were not measured: for one row, a tile like those of the measured shapes; for
    several rows None, which stands for torch's product."""
    if bucket > 1:
        return None
    warps = next((warps for warps in (4, 2, 1) if k % (256 * warps) == 0), None)
    return None if warps is None else ProductTile(1, 2 if n < 65536 else 4, 256 * warps, warps, ahead=16)


def describe(n: int, k: int) -> str:
    """Return a text for people that lists the choices for a weight ``[n, k]``."""
    source = "measured" if (n, k) in MEASURED else "not measured"
    choices = ((bucket, tile_of(bucket, n, k)) for bucket in BUCKETS)
    texts = [f"up to {bucket} rows {'torch' if tile is None else _text(tile)}" for bucket, tile in choices]
    return f"[{n}, {k}] {source}: {', '.join(texts)}, more torch"


def _text(tile: ProductTile) -> str:
    split = f" in {tile.split} parts" if tile.split > 1 else ""
    return f"triton {tile.block_m}x{tile.block_n}x{tile.block_k}{split}{' early' if tile.early else ''}"
