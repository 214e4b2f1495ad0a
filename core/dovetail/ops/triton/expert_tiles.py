"""Choose how the products of experts are divided into tiles.

With few pairs per expert the products take the time to read the weights: blocks have 16 rows, so that most experts have
one block and their weights are read once, and tiles are small, so that there are programs for all multiprocessors. With
many pairs they take the time to multiply: larger tiles read each operand less often. Routers of trained models choose some
experts much more often than others: from 8 pairs per expert on average, blocks of 64 rows are up to 16 % faster than blocks of 16 for such
choices, and 4 % slower if all experts are chosen equally often.
"""

from __future__ import annotations

from typing import NamedTuple


class ExpertTile(NamedTuple):
    """Describe a tile of a grouped product: ``block_n`` columns of the result, for the activation as many of gate and
    of up. The number of rows is that of the blocks of pairs, see ``ExpertOrder``. Unless ``per_sm`` is None, the kernel is that of
    ``experts_many``, with this number of programs for each multiprocessor."""

    block_n: int
    block_k: int
    warps: int
    stages: int
    per_sm: int | None = None


class ExpertTiles(NamedTuple):
    """Describe how a layer of experts is computed: blocks of up to ``block_m`` pairs, and the tiles of both
    products."""

    block_m: int
    gate_up: ExpertTile
    down: ExpertTile


_BY_ROWS = {
    16: ExpertTiles(16, ExpertTile(64, 128, 4, 3), ExpertTile(128, 128, 8, 3)),
    64: ExpertTiles(64, ExpertTile(64, 64, 4, 4), ExpertTile(128, 64, 4, 4)),
    128: ExpertTiles(128, ExpertTile(128, 64, 8, 4), ExpertTile(256, 64, 8, 4)),
}
"""Map the number of rows of a block to its tiles: the fastest for Qwen3-30B-A3B on an H200, of those that
``benchmarks/experts_gpu.py --tune`` tries."""
_MANY = ExpertTiles(128, ExpertTile(128, 64, 8, 4, 1), ExpertTile(128, 64, 4, 3, 2))
"""The tiles of ``experts_many`` in place of blocks of 128 rows. On an H200 with 8,192 tokens of Qwen3-30B-A3B, gate and up take 643 us
instead of 726 with uniform routing, and 848 instead of 825 with skewed routing; ``down`` 363 instead of 399, and 403 instead of 451. In
smaller blocks none of the tiles that were measured is more than 4 % faster than those above."""


def tiles_of(
    tokens: int, experts: int, top_k: int, hidden: int, size: int, share: float, itemsize: int, many: bool = False
) -> ExpertTiles:
    """Return the tiles for a number of tokens. This rank has ``experts`` experts, which are ``share`` of all. ``many``: the kernels
    of ``experts_many`` may be used."""
    rows = tokens * top_k * share / experts
    block_m = 16 if tokens <= 16 or rows <= 8 else 64 if rows <= 128 else 128
    return _all_fitted(_MANY if many and block_m == 128 else _BY_ROWS[block_m], hidden, size, itemsize)


def many_tiles(hidden: int, size: int, itemsize: int) -> ExpertTiles:
    """Return the tiles of ``experts_many`` for any number of tokens."""
    return _all_fitted(_MANY, hidden, size, itemsize)


def invariant_tiles(hidden: int, size: int, itemsize: int) -> ExpertTiles:
    """Return the tiles for any number of tokens, see ``experts.experts``. With few tokens each expert still has one block,
    whose weight is read once."""
    return _all_fitted(_BY_ROWS[64], hidden, size, itemsize)


def _all_fitted(tiles: ExpertTiles, hidden: int, size: int, itemsize: int) -> ExpertTiles:
    return tiles._replace(
        gate_up=_fitted(tiles.gate_up, size, hidden, itemsize), down=_fitted(tiles.down, hidden, size, itemsize)
    )


_FEWEST_COLUMNS = 128
"""The smallest number of columns of the result to which a tile is cut for a narrow weight. With tiles of 64 pairs and 32 columns in
float32, the kernel that Triton 3.6 compiles for ``down`` writes to addresses that are not those of its columns."""


def _fitted(tile: ExpertTile, n: int, k: int, itemsize: int) -> ExpertTile:
    """Return ``tile`` for a weight of n rows and k columns. The tiles of float32 have half as many columns of the
    weight, which are as many bytes."""
    block_k = tile.block_k * 2 // itemsize if itemsize > 2 else tile.block_k
    while block_k > 64 and k % block_k:
        block_k //= 2  # a column that is not a multiple needs masks
    return tile._replace(
        block_n=min(tile.block_n, max(_FEWEST_COLUMNS, fitting_power(n))), block_k=min(block_k, fitting_power(k))
    )


def fitting_power(number: int) -> int:
    """Return the smallest power of 2 of at least ``number`` and 16."""
    return max(16, 1 << (number - 1).bit_length())
