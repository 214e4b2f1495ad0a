"""How much of the work a program does at a time, for each shape. Measured on H200 with bfloat16; the rest are choices that fit."""

from __future__ import annotations

from typing import NamedTuple

import torch

MAX_ROWS = 128
WAVES = 2
"""Programs for each place on the device, in a step whose rows are split: more even out rows of different lengths, fewer
leave less to merge."""


class Tile(NamedTuple):
    """A program attends with ``rows`` pairs of a query and a head, to ``keys`` keys at a time; ``resident`` programs fit on
    a processor."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    resident: int


def choose(wanted: int, key_dim: int, value_dim: int, dtype: torch.dtype, shared_memory: int) -> Tile:
    """The tile where an entry has at most ``wanted`` pairs of a query and a head that read one key head."""
    wide = _power(max(key_dim, value_dim))
    if dtype.itemsize == 4:  # no matrix units: registers hold both operands
        rows, keys = min(64, max(16, 4096 // wide), _power(wanted)), 32
        return _fit(Tile(rows, keys, 4, 2, 2), wide, 4, shared_memory)
    rows = min(MAX_ROWS if wide <= 128 else 64, _power(wanted))
    keys = 128 if wide <= 64 else 64 if wide <= 128 else 32
    return _fit(Tile(rows, keys, 8 if rows == MAX_ROWS else 4, 3, 2), wide, dtype.itemsize, shared_memory)


def slots(tile: Tile, processors: int, kv_heads: int) -> int:
    """Programs for each key head that keep all processors busy."""
    return max(1, WAVES * tile.resident * processors // kv_heads)


def _fit(tile: Tile, wide: int, size: int, shared_memory: int) -> Tile:
    queries, block = tile.rows * wide * size, 2 * tile.keys * wide * size
    stages = max(1, min(tile.num_stages, (shared_memory - queries) // block))
    resident = max(1, min(tile.resident, shared_memory // (queries + stages * block)))
    return tile._replace(num_stages=stages, resident=resident)


def _power(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())
