"""How much a program does at a time, for each shape: what was fastest on H200 in bfloat16, and what elsewhere needs less than
the 99 KiB of shared memory and the registers that every processor has."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dovetail.ops.triton.pages import parts

ROOM = 220 << 10
"""Bytes of shared memory on a processor from which on more keys may be on their way: Hopper and later, in data centres."""


class AttentionTile(NamedTuple):
    """A program attends with ``rows`` pairs of a query and a head, to ``keys`` keys at a time. ``resident`` programs on each
    processor keep it busy."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    resident: int


def choose(
    wanted: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    *,
    tree: bool = False,
    roomy: bool = False,
    few: bool = False,
) -> AttentionTile:
    """The tile where an entry has at most ``wanted`` pairs of a query and a head that read one key head. ``tree``: queries
    have a mask. ``roomy``: see ``ROOM``. ``few``: most processors would have nothing to do, were
    keys not cut; that counts for entries of up to 32 pairs without a mask."""
    wide, wanted = _power(max(parts(key_dim)[0], value_dim)), _power(wanted)
    if wide > 256:  # latent attention
        if dtype.itemsize == 4:
            return AttentionTile(16, 16, 8, 1, 1)
        return AttentionTile(min(wanted, 32), 32 if roomy else 16, 8, 2, 1)
    if dtype.itemsize == 4:  # without matrix units, operands are held in registers
        return AttentionTile(min(wanted, 32 if wide <= 64 else 16), 32, 8, 2, 2)
    if wanted <= 32 and not tree:  # as many bytes on their way as registers allow
        keys = min(64, 8192 // wide) if few else min(128, 16384 // wide)
        return AttentionTile(wanted, keys, 4, 3, 2 if wide >= 128 else 4)
    keys = 128 if wide <= 64 else 64 if wide == 128 else 32
    if wanted <= 64 or ((tree or wide > 128) and not roomy):  # a mask takes room beside the keys
        return AttentionTile(min(wanted, 64), keys, 8 if tree else 4, 3, 2)
    if wide > 128:
        return AttentionTile(128, 64, 8, 3, 1)
    return AttentionTile(128, keys, 8, 5 if roomy else 3, 1)


def slots(tile: AttentionTile, processors: int, kv_heads: int) -> int:
    """Programs for each key head that keep all processors busy."""
    return max(1, tile.resident * processors // kv_heads)


def _power(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())
