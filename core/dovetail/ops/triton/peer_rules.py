"""Choose how ranks add up and gather tensors through peer memory. Measured with two ranks on H200
(docs/benchmarks.md)."""

from __future__ import annotations

MOST_RANKS = 8
MOST_WARPS = 16
"""A program has at most this number of warps."""
ONE_SHOT_BYTES = 1 << 18
"""With more than two ranks, tensors up to this size are sent to all ranks, and larger ones only to the rank that adds up
a row. This was not measured. Two ranks send the same number of bytes either way, and always add up in one shot: it is
the faster one for 1 to 8192 rows."""
CHANNEL_BYTES = 64 << 20
"""A rank receives up to this number of bytes at once from each rank; the rows of larger tensors follow each other."""
GATHER_CHUNKS = 512
"""A block of a gathered row has this number of chunks of 16 bytes."""
GATHER_BYTES = 8 << 20
"""A rank receives up to this number of bytes at once from each rank when rows are gathered."""


def is_one_shot(ranks: int, rows: int, row_bytes: int) -> bool:
    """Return True if ``rows`` rows of ``row_bytes`` bytes are added up in one shot, and False if in two."""
    return ranks == 2 or rows * row_bytes <= ONE_SHOT_BYTES


def channel_rows(ranks: int, row_bytes: int, *, one_shot: bool) -> int:
    """Return the number of rows that are added up at once."""
    if one_shot:
        return max(1, (CHANNEL_BYTES if ranks == 2 else ONE_SHOT_BYTES) // row_bytes)
    return ranks * max(1, CHANNEL_BYTES // row_bytes // ranks)
