"""Pack token ids into bitmask rows."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dovetail.types import IntArray


def pack_bits(width: int, token_ids: Iterable[int]) -> IntArray:
    """Return a bitmask row of ``width`` tokens with the bits of ``token_ids`` set: int32 ``[ceil(width / 32)]``."""
    flags = np.zeros(-(-width // 32) * 32, np.uint8)
    flags[list(token_ids)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)
