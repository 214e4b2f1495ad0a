"""Write GGUF files for tests, from the description of the format and without the code that reads them."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ALIGNMENT = 32
CODES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12,
         "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23, "BF16": 30, "MXFP4": 39}  # fmt: skip


class Stored(NamedTuple):
    """Hold a tensor as a file stores it; ``shape`` is in the order of torch."""

    type: str
    shape: Sequence[int]
    data: bytes


def plain(array: np.ndarray) -> Stored:
    """Return ``array`` stored in float32."""
    return Stored("F32", array.shape, np.ascontiguousarray(array, np.float32).tobytes())


def quantized_q8_0(array: np.ndarray) -> Stored:
    """Return ``array`` in blocks of type Q8_0."""
    blocks = np.ascontiguousarray(array, np.float32).reshape(-1, 32)
    scale = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
    codes = np.round(blocks / np.maximum(scale.astype(np.float32), 1e-12)).clip(-127, 127).astype(np.int8)
    return Stored("Q8_0", array.shape, np.concatenate((scale.view(np.uint8), codes.view(np.uint8)), 1).tobytes())


def write_gguf(file: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Stored]) -> Path:
    """Write a file of version 3, and return its path. Integers are stored in 32 bits, floats in float32."""
    file.write_bytes(gguf_bytes(metadata, tensors))
    return file


def gguf_bytes(metadata: Mapping[str, Any], tensors: Mapping[str, Stored]) -> bytes:
    """Return the content of a file."""
    start = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        start += _text(key) + _value(value)
    data = b""
    for name, tensor in tensors.items():
        dims = tensor.shape[::-1]
        start += _text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, CODES[tensor.type], len(data))
        data += _padded(tensor.data)
    return _padded(start) + data


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT)


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<Ii", 5, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
        case [float(), *_]:
            return struct.pack(f"<IIQ{len(value)}f", 9, 6, len(value), *value)
        case [bool(), *_]:
            return struct.pack(f"<IIQ{len(value)}?", 9, 7, len(value), *value)
        case _:
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
