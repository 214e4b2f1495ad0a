"""How much a program does at a time, for each shape: what was fastest on H200 in bfloat16, and what elsewhere needs less than
the 99 KiB of shared memory and the registers that every processor has."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """A program attends with ``rows`` pairs of a query and a head, to ``keys`` keys at a time. ``resident`` programs on each
    processor keep it busy."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    resident: int


def choose(wanted: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> Tile:
    """The tile where an entry has at most ``wanted`` pairs of a query and a head that read one key head."""
    wide, wanted = _power(max(key_dim, value_dim)), _power(wanted)
    if dtype.itemsize == 4:  # without matrix units, operands are held in registers
        return Tile(min(wanted, 32 if wide <= 64 else 16), 32, 8, 2, 2)
    keys = 128 if wide <= 64 else 64 if wide == 128 else 32
    if wanted < 64:
        return Tile(wanted, keys, 4, 3, 4)
    if wanted == 64 or wide > 128:
        return Tile(64, keys, 4, 3, 2)
    return Tile(128, keys, 8, 3, 1)


def slots(tile: Tile, processors: int, kv_heads: int) -> int:
    """Programs for each key head that keep all processors busy."""
    return max(1, tile.resident * processors // kv_heads)


def _power(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())
