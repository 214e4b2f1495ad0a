"""Encode large values as JSON on a thread in short parts, so that other threads run between them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

_LONG = 0.002
"""Seconds that the encoding of a part may take. The encoder is one call, during which no other Python thread runs."""

_FEW = 4
"""Lists with fewer items are divided into items at once, because each of these may be large."""

_DEPTH = 4
"""The depth to which objects and lists are divided."""


def _as_list(value: object) -> object:
    """Return the numbers of an array. An array becomes a list only when it is written, because Python frees a list of all
    the numbers of an answer in one go, which takes many milliseconds."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is in an answer; allowed: what JSON has, and arrays of numpy")


_encoder = msgspec.json.Encoder(enc_hook=_as_list)


def encode_json(value: object) -> bytes:
    """Return ``value`` as JSON. Arrays of numpy are written as lists of their numbers."""
    return _encoder.encode(value)


def encode_in_parts(value: object) -> memoryview:
    """Return ``encode_json(value)``, made of parts. Between two parts other threads run."""
    buffer = bytearray()
    _append(buffer, value, 0)
    return memoryview(buffer)


def _append(buffer: bytearray, value: Any, depth: int) -> None:
    """Append the JSON of ``value``."""
    if depth < _DEPTH and isinstance(value, Mapping) and value:
        for i, (key, item) in enumerate(value.items()):
            at = len(buffer)
            _encode(buffer, {key: None})
            del buffer[-len(b"null}") :]
            buffer[at : at + 1] = b"," if i else b"{"
            _append(buffer, item, depth + 1)
        buffer += b"}"
    elif depth < _DEPTH and isinstance(value, list | tuple) and value:
        _append_items(buffer, value, depth)
    else:
        _encode(buffer, value)


def _append_items(buffer: bytearray, items: list[Any] | tuple[Any, ...], depth: int) -> None:
    """Append the JSON of a list, in slices that take about ``_LONG``. If a single item takes longer, the next ones are
    divided."""
    done, count = 0, 1 if len(items) >= _FEW else 0
    while done < len(items) and count:
        at, start = len(buffer), time.perf_counter()
        _encode(buffer, items[done : done + count])
        seconds = time.perf_counter() - start
        buffer[at : at + 1] = b"," if done else b"["
        del buffer[-1:]
        done += count
        if seconds > _LONG:
            count //= 2
        elif seconds < _LONG / 2:
            count *= 2
    for i in range(done, len(items)):
        buffer += b"," if i else b"["
        _append(buffer, items[i], depth + 1)
    buffer += b"]"


def _encode(buffer: bytearray, value: object) -> None:
    """Append a part. Then let threads run that wait: Python would change threads only once they have waited for its switch
    interval."""
    _encoder.encode_into(value, buffer, -1)
    time.sleep(0)
