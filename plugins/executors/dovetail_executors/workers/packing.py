"""Turn structs with numpy arrays into bytes and back.

The bytes are the length of the head (uint32), the head in MessagePack, and the arrays, each of which begins at a multiple
of 8. In the head an array is an extension value that holds its shape and its dtype, byte order included.
"""

from __future__ import annotations

import struct
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")

_ARRAY = 1  # the code of the extension type
_LENGTH = struct.Struct("<I")
_PAD = [bytes(-n % 8) for n in range(8)]
_KINDS, _MOST_BYTES = "biuf", 8  # of the elements of arrays
_MOST_KNOWN = 4096  # shapes that are remembered; more of them means that they do not repeat


class Packer:
    """Turn structs into bytes. Raises ``TypeError`` for arrays whose elements are not numbers or booleans."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._hook)
        self._parts: list[bytes] = []
        self._known: dict[tuple[np.dtype[Any], tuple[int, ...]], msgspec.msgpack.Ext] = {}

    def pack(self, value: Any) -> bytes:
        """Return ``value`` as bytes."""
        self._parts = []
        head = self._encoder.encode(value)
        size = len(head)
        return b"".join([_LENGTH.pack(size), head, _PAD[(size + 4) % 8], *self._parts])

    def _hook(self, value: Any) -> Any:
        if type(value) is np.ndarray:
            data = value.tobytes()
            self._parts.append(data)
            if len(data) % 8:
                self._parts.append(_PAD[len(data) % 8])
            key = value.dtype, value.shape
            return self._known.get(key) or self._described(key)
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"{type(value).__name__} cannot be sent to another process")

    def _described(self, key: tuple[np.dtype[Any], tuple[int, ...]]) -> msgspec.msgpack.Ext:
        dtype, shape = key
        if dtype.kind not in _KINDS or dtype.itemsize > _MOST_BYTES:
            raise TypeError(f"arrays of dtype {dtype} cannot be sent to another process")
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        described = msgspec.msgpack.Ext(_ARRAY, struct.pack(f"<{len(shape)}Q", *shape) + dtype.str.encode())
        self._known[key] = described
        return described


class Unpacker(Generic[T]):
    """Turn bytes into values of type ``cls``. Their arrays are views of the bytes."""

    def __init__(self, cls: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(cls, ext_hook=self._array, dec_hook=_as_it_is)
        self._known: dict[bytes, tuple[np.dtype[Any], int, tuple[int, ...], int]] = {}
        self._data = bytearray()
        self._offset = 0

    def unpack(self, data: bytearray) -> T:
        """Return the value. ``data`` must not change as long as its arrays are in use."""
        (size,) = _LENGTH.unpack_from(data)
        self._data, self._offset = data, size + 4 + (-(size + 4) % 8)
        value = self._decoder.decode(memoryview(data)[4 : 4 + size])
        self._data = bytearray()
        return value

    def _array(self, code: int, described: memoryview) -> Any:
        key = bytes(described)
        dtype, count, shape, size = self._known.get(key) or self._read(key)
        array = np.frombuffer(self._data, dtype, count, self._offset)
        self._offset += size
        return array if len(shape) == 1 else array.reshape(shape)

    def _read(self, key: bytes) -> tuple[np.dtype[Any], int, tuple[int, ...], int]:
        split = len(key) // 8 * 8  # the name of a dtype has 3 bytes
        shape, dtype = struct.unpack(f"<{split // 8}Q", key[:split]), np.dtype(key[split:].decode())
        count = int(np.prod(shape, dtype=np.int64))
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        found = self._known[key] = dtype, count, shape, -(-count * dtype.itemsize // 8) * 8
        return found


def _as_it_is(cls: type, value: Any) -> Any:
    return value
