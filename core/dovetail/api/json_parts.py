"""Encode large values as JSON on a thread in short parts, so that other threads run between them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

_LONG = 0.002
"""Seconds that the encoding of a part may take. The encoder is one call, during which no other Python thread runs."""

_FEW = 4
"""Lists with fewer items are divided into items at once, because each of these may be large."""

_DEPTH = 4
"""The depth to which objects and lists are divided."""


def encode_in_parts(value: object) -> bytes:
    """Return ``msgspec.json.encode(value)``, made of parts. Between two parts other threads run."""
    return b"".join(_parts(value, 0))


def _parts(value: Any, depth: int) -> Iterator[bytes]:
    if depth < _DEPTH and isinstance(value, Mapping) and value:
        mark = b"{"
        for key, item in value.items():
            yield mark + msgspec.json.encode({key: None})[1:-5]
            yield from _parts(item, depth + 1)
            mark = b","
        yield b"}"
    elif depth < _DEPTH and isinstance(value, list | tuple) and value:
        yield from _items(value, depth)
    else:
        yield _encoded(value)


def _items(items: list[Any] | tuple[Any, ...], depth: int) -> Iterator[bytes]:
    """Yield the JSON of a list in slices that take about ``_LONG``. If a single item takes longer, the next ones are divided."""
    at, count, mark = 0, 1, b"["
    if len(items) < _FEW:
        count = 0
    while at < len(items) and count:
        start = time.perf_counter()
        data = _encoded(items[at : at + count])
        seconds = time.perf_counter() - start
        yield mark + data[1:-1]
        at, mark = at + count, b","
        if seconds > _LONG:
            count //= 2
        elif seconds < _LONG / 2:
            count *= 2
    for item in items[at:]:
        yield mark
        yield from _parts(item, depth + 1)
        mark = b","
    yield b"]"


def _encoded(value: object) -> bytes:
    """Encode a part. Then let threads run that wait: Python would change threads only once they have waited for its switch interval."""
    data = msgspec.json.encode(value)
    time.sleep(0)
    return data
