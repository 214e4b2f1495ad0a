"""Encode ranges of characters in UTF-8 (RFC 3629)."""

from __future__ import annotations

from collections.abc import Iterator

Spans = tuple[tuple[int, int], ...]


def encoded(low: int, high: int) -> Iterator[Spans]:
    """Yield the characters from ``low`` to ``high`` as products of byte ranges, one range for each byte. The range must
    not contain surrogates."""
    for top in (0x7F, 0x7FF, 0xFFFF):
        if low <= top < high:
            yield from encoded(low, top)
            yield from encoded(top + 1, high)
            return
    count = len(chr(high).encode())
    for index in range(1, count):
        block = (1 << 6 * index) - 1
        if low & ~block != high & ~block:
            cut = low | block if low & block else (high & ~block) - 1 if high & block != block else None
            if cut is not None:
                yield from encoded(low, cut)
                yield from encoded(cut + 1, high)
                return
    yield tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))
