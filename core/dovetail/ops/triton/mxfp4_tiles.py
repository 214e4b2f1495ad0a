"""Choose how the products of experts with MXFP4 weights are divided into tiles.

``benchmarks/experts_gpu.py --format mxfp4`` measures them. A warp dequantizes rows of the weight for all pairs of its block: with few pairs, tiles have 16 to 32 rows for each warp, and there are many programs. With many pairs tiles are larger, so that a dequantized
row is multiplied with many pairs. A tile has at least four scales for each thread (``reads_ahead``): fewer bytes cannot be
copied to shared memory ahead of their use.
"""

from __future__ import annotations

from typing import NamedTuple

MOST_SHARED = 224 << 10
"""The bytes of shared memory that a tile may use."""


class Mxfp4Tile(NamedTuple):
    """Describe a tile of a weight: ``block_n`` rows, for the activation half of them of gate and half of up."""

    block_n: int
    block_k: int
    warps: int
    stages: int


class Mxfp4Tiles(NamedTuple):
    """Describe how a layer of experts is computed: blocks of up to ``block_m`` pairs, and the tiles of both
    products."""

    block_m: int
    gate_up: Mxfp4Tile
    down: Mxfp4Tile


_FEW_TOKENS = 8
"""Up to this number of tokens there are few blocks: tiles are smaller, so that there are programs for all multiprocessors."""
_FEW = Mxfp4Tiles(8, Mxfp4Tile(64, 128, 2, 6), Mxfp4Tile(32, 256, 2, 6))
_BY_MEAN = {
    3: Mxfp4Tiles(8, Mxfp4Tile(128, 256, 4, 3), Mxfp4Tile(64, 256, 4, 4)),
    6: Mxfp4Tiles(8, Mxfp4Tile(128, 256, 4, 3), Mxfp4Tile(64, 256, 2, 4)),
    10: Mxfp4Tiles(16, Mxfp4Tile(128, 128, 2, 3), Mxfp4Tile(64, 128, 2, 3)),
    24: Mxfp4Tiles(32, Mxfp4Tile(64, 128, 2, 4), Mxfp4Tile(64, 128, 2, 4)),
    100: Mxfp4Tiles(64, Mxfp4Tile(128, 128, 4, 3), Mxfp4Tile(64, 256, 4, 3)),
}
_MANY = Mxfp4Tiles(128, Mxfp4Tile(128, 256, 8, 2), Mxfp4Tile(128, 128, 4, 3))
"""The tiles up to a mean number of pairs of an expert. On an H200 with gpt-oss-20b, those of 1, 20 and 32 tokens (4 pairs)
are the fastest of 22 to 53, over routing that is uniform, skewed or that of dummy weights together. With 64 tokens (8 pairs), blocks of
16 are faster than the fastest of blocks of 8 (the line above) if some experts have more than 8 pairs: 181 us for a layer with skewed routing and
130 with that of dummy weights (12.6 experts used) instead of 196 and 158. With exactly 8 pairs for each expert they are slower,
192 instead of 151. The others were not measured. An expert with several blocks is read, and dequantized, several times."""


def tiles_of(tokens: int, experts: int, top_k: int, hidden: int, size: int, share: float, itemsize: int) -> Mxfp4Tiles:
    """Return the tiles for a number of tokens. This rank has ``experts`` experts, which are ``share`` of all."""
    rows = tokens * top_k * share / experts
    found = next((tiles for most, tiles in _BY_MEAN.items() if rows <= most), _MANY)
    block_m, gate_up, down = _FEW if tokens <= _FEW_TOKENS else found
    return Mxfp4Tiles(block_m, _fitted(gate_up, block_m, hidden, itemsize), _fitted(down, block_m, size, itemsize))


def reads_ahead(tile: Mxfp4Tile) -> bool:
    """Return whether the compiler can have the scales of a tile read ahead."""
    return tile.block_n * tile.block_k // 32 >= 4 * 32 * tile.warps


def shared_bytes(tile: Mxfp4Tile, block_m: int, itemsize: int) -> int:
    """Return the bytes of shared memory that the stages of a tile use at most."""
    codes_and_scales = tile.block_n * (tile.block_k // 2 + tile.block_k // 32)
    return tile.stages * (codes_and_scales + block_m * tile.block_k * itemsize)


def _fitted(tile: Mxfp4Tile, block_m: int, k: int, itemsize: int) -> Mxfp4Tile:
    """Return ``tile`` for weights with k columns. Tiles of activations in float32 have half as many."""
    while tile.block_k > 64 and tile.block_k >= 2 * k:
        tile = tile._replace(block_k=tile.block_k // 2)
    while tile.block_k > 64 and shared_bytes(tile, block_m, itemsize) > MOST_SHARED:
        tile = tile._replace(block_k=tile.block_k // 2)
    return tile
