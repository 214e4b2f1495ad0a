"""Choose how much a program computes at a time, for each shape.

The tiles are those that were fastest on H200 in bfloat16. On other devices they are tiles that need at most the 99 KiB
of shared memory and the registers that every multiprocessor has.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dovetail.ops.triton.pages import parts

LARGE_SHARED_MEMORY = 220 << 10
"""The bytes of shared memory of a multiprocessor from which on more keys can be in flight: Hopper and later, in data
centres."""


LEAST_ROWS = 16
"""The rows of the smallest tile that tensor cores multiply."""


class AttentionTile(NamedTuple):
    """Describe a tile: a program attends with ``rows`` pairs of a query and a head to ``keys`` keys at a time.

    ``resident`` programs keep a multiprocessor busy. For ``flip`` and ``halves`` see ``latent``, for ``registers`` ``ops.triton.launch``.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    resident: int
    flip: bool = False
    halves: bool = False
    registers: int | None = None


LATENT_TILES = {
    16: AttentionTile(16, 32, 4, 3, 2, halves=True),
    32: AttentionTile(32, 64, 8, 2, 1, flip=True),
    64: AttentionTile(64, 64, 8, 2, 1),
}
"""The tiles for latents in 16 bits, by the number of rows, measured with ``benchmarks/latent_gpu.py --tune`` on an H200, except that of 32
rows, which was chosen by the registers and the shared memory that the compiler reports. An accumulator of 64 rows and 512 numbers takes
half of the registers of a multiprocessor."""

FEW_LATENTS_TILE = AttentionTile(16, 64, 8, 3, 1, halves=True, registers=160)
"""The tile for latents in 16 bits of few rows of up to 16 pairs, measured likewise: half as many partial results are merged, and
the programs of the merge and of the next layer start before the last programs have ended. Without a limit, the compiler keeps to 128
registers, with which addresses of later latents are computed after the products instead of meanwhile."""

CONVERTED_TILES = {16: AttentionTile(16, 32, 4, 3, 2), 64: AttentionTile(64, 64, 8, 3, 1)}
"""The tiles for latents in 8 bits, which become 16 bits in registers, measured likewise."""

EXPANDED_TILES = {64: AttentionTile(64, 64, 4, 3, 1), 128: AttentionTile(128, 64, 8, 3, 1)}
"""The tiles for expanded prompts in 16 bits, by the number of rows, measured with ``benchmarks/latent_gpu.py --tune``."""


def choose(
    wanted: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    *,
    tree: bool = False,
    large_memory: bool = False,
    few: bool = False,
) -> AttentionTile:
    """Return the tile for entries that have at most ``wanted`` pairs of a query and a head that read one key head.

    ``tree``: the queries have a mask. ``large_memory``: see ``LARGE_SHARED_MEMORY``. ``few``: most processors would be
    idle if keys were not cut; this matters for entries of up to 32 pairs without a mask.
    """
    wide, wanted = _power(max(parts(key_dim)[0], value_dim)), _power(wanted)
    if wide > 256:
        if dtype.itemsize == 4:
            return AttentionTile(16, 16, 8, 1, 1)
        return AttentionTile(min(wanted, 32), 32 if large_memory else 16, 8, 2, 1)
    if dtype.itemsize == 4:  # there are no matrix units for float32: operands are held in registers
        return AttentionTile(min(wanted, 32 if wide <= 64 else 16), 32, 8, 2, 2)
    if wanted <= 32 and not tree:  # as many bytes in flight as registers allow
        keys = min(64, 8192 // wide) if few else min(128, 16384 // wide)
        return AttentionTile(wanted, keys, 4, 3, 2 if wide >= 128 else 4)
    keys = 128 if wide <= 64 else 64 if wide == 128 else 32
    if wanted <= 64 or (
        (tree or wide > 128) and not large_memory
    ):  # a mask takes shared memory in addition to the keys
        return AttentionTile(min(wanted, 64), keys, 8 if tree else 4, 3, 2)
    if wide > 128:
        return AttentionTile(128, 64, 8, 3, 1)
    return AttentionTile(128, keys, 8, 5 if large_memory else 3, 1)


def choose_latent(
    wanted: int, dtype: torch.dtype, pool: torch.dtype, *, large_memory: bool, two: bool = False, few: bool = False
) -> AttentionTile:
    """Return the tile for latents of a ``pool`` and at most ``wanted`` pairs of a query and a head. ``two``: programs
    keep two accumulators, which takes registers. ``few``: there are few rows."""
    if dtype.itemsize == 4:
        return AttentionTile(16, 16, 8, 1, 1)
    wanted = LEAST_ROWS if two else _power(wanted)
    if not large_memory:
        return AttentionTile(min(wanted, 32), 16, 8, 2, 1)
    if pool != dtype:
        return CONVERTED_TILES[16 if wanted <= 16 else 64]
    return FEW_LATENTS_TILE if few and wanted == LEAST_ROWS else LATENT_TILES[min(wanted, 64)]


def choose_expanded(wanted: int, dtype: torch.dtype, *, large_memory: bool) -> AttentionTile:
    """Return the tile for expanded prompts of at most ``wanted`` queries, with keys of up to 256 numbers."""
    if dtype.itemsize == 4:
        return AttentionTile(16, 16, 4, 1, 2)
    if not large_memory:
        return AttentionTile(min(_power(wanted), 64), 32, 4, 2, 1)
    return EXPANDED_TILES[min(max(_power(wanted), 64), 128)]


def slots(tile: AttentionTile, processors: int, kv_heads: int) -> int:
    """Return the number of programs per key head that keep all processors busy."""
    return max(1, tile.resident * processors // kv_heads)


def _power(n: int) -> int:
    return max(LEAST_ROWS, 1 << (n - 1).bit_length())
