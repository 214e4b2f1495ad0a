"""Parse GGUF files and map their tensors into memory.

A file may be hostile or cut off. What it claims is compared with the number of bytes that it has before anything of that
size is allocated, and every error names the place.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dovetail.errors import ConfigError
from dovetail.gguf.block_types import BY_CODE, TYPES, UNREAD, BlockType
from dovetail.gguf.files import shard_files

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_NAME = 65535
"""The longest key of metadata and name of a tensor, in bytes."""
MAX_STRINGS = 1 << 22
"""The largest number of strings in an array; vocabularies and merges have less than a million."""

STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {
    0: np.dtype("<u1"), 1: np.dtype("<i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"), 4: np.dtype("<u4"), 5: np.dtype("<i4"),
    6: np.dtype("<f4"), BOOL: np.dtype("<u1"), 10: np.dtype("<u8"), 11: np.dtype("<i8"), 12: np.dtype("<f8"),
}  # fmt: skip
"""The types of metadata that have a fixed size."""

EXPECTED = {
    int: "an integer", float: "a number", bool: "true or false", str: "a text", list: "an array of texts",
    np.ndarray: "an array of numbers",
}  # fmt: skip
"""What errors call the types of metadata."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Describe a tensor of a file. ``shape`` is in the order of torch: the last dimension is contiguous, and divided into
    blocks of ``type``. ``data`` are its bytes, uint8 ``[*shape[:-1], bytes of a row]``, a read-only view of the file."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    file: Path
    offset: int
    data: np.ndarray = field(repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes in the file."""
        return self.data.nbytes


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Hold the metadata and the tensors of a checkpoint, which may be split into several files. Arrays of numbers in
    ``metadata`` are numpy arrays, arrays of strings are lists."""

    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """Return the name that llama.cpp gives to the architecture. Raises ``ConfigError`` if there is none."""
        return self.get("general.architecture", str)

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Return a value of the metadata of type ``kind``; integers are accepted as floats. Raises ``ConfigError`` if it is
        missing and there is no ``default``, or has another type."""
        value = self.find(key, kind)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"{self.files[0]} has no {key} in its metadata; convert the checkpoint again")
        return value

    def find(self, key: str, kind: type[T]) -> T | None:
        """Return a value of the metadata of type ``kind``, or None if the file has none; integers are accepted as floats.
        Raises ``ConfigError`` if it has another type, or is not a finite number."""
        value: Any = self.metadata.get(key)
        if value is None:
            return None
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{self.files[0]}: {key} is {value!s:.60}; expected {EXPECTED[kind]}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{self.files[0]}: {key} is {value}; expected a finite number")
        return value

    def strings(self, key: str) -> list[str] | None:
        """Return an array of strings of the metadata, or None if the file has none. Raises ``ConfigError`` if it is
        something else."""
        value = self.metadata.get(key)
        empty = isinstance(value, np.ndarray) and not len(value)
        return [] if empty else self.find(key, list)

    def numbers(self, key: str) -> np.ndarray | None:
        """Return an array of numbers of the metadata, or None if the file has none. Raises ``ConfigError`` if it is
        something else, or contains a number that is not finite."""
        found = self.find(key, np.ndarray)
        if found is not None and not np.isfinite(found).all():
            raise ConfigError(
                f"{self.files[0]}: {key} contains numbers that are not finite; convert the checkpoint again"
            )
        return found


def read_gguf(file: Path) -> GgufFile:
    """Read a GGUF file, and the others if its name ends with ``-00001-of-0000N.gguf``. Their tensors are mapped into
    memory and not read. Raises ``ConfigError`` if a file cannot be read, is damaged or cut off, or contains a tensor of an
    unknown type."""
    files = shard_files(file)
    parsed = [_Parser(one).parse() for one in files]
    metadata, tensors = parsed[0].metadata, dict[str, GgufTensor]()
    for index, one in enumerate(parsed):
        split = one.metadata.get("split.count", 1), one.metadata.get("split.no", 0)
        if split != (len(files), index):
            raise ConfigError(
                f"{one.files[0]} is part {split[1]!s:.20} of {split[0]!s:.20} by its metadata, and part {index} of {len(files)} by its "
                "name; keep the names that the parts were published with (-00001-of-0000N.gguf)"
            )
        for name, tensor in one.tensors.items():
            if name in tensors:
                raise ConfigError(f"tensor {name} is in {tensors[name].file.name} and again in {one.files[0].name}")
            tensors[name] = tensor
    expected = metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise ConfigError(f"{files[0]} and its other parts have {len(tensors)} tensors instead of {expected!s:.20}")
    return GgufFile(tuple(files), metadata, tensors)


def tensor_bytes(file: Path) -> Iterator[tuple[str, str, tuple[int, ...], np.ndarray]]:
    """Yield for every tensor its name, the name of its type (a key of ``block_types.TYPES``), its shape in the order of
    torch, and its bytes, uint8 ``[*shape[:-1], bytes of a row]``. Raises like ``read_gguf``."""
    for tensor in read_gguf(file).tensors.values():
        yield tensor.name, tensor.type.name, tensor.shape, tensor.data


class _Parser:
    """Read one file from the beginning. ``at`` is the place of the next byte."""

    def __init__(self, file: Path) -> None:
        self.file, self.at = file, 0
        try:
            with file.open("rb") as opened:
                start = opened.read(len(MAGIC))
                if start != MAGIC:
                    raise ConfigError(f"{file} is not a GGUF file: it begins with {start!r} instead of {MAGIC!r}")
                self.content = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise error if isinstance(error, ConfigError) else ConfigError(f"{file} cannot be read: {error}") from error
        self.size = len(self.content)

    def parse(self) -> GgufFile:
        self.at = len(MAGIC)
        version = self._number(4, "the version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            order = " in big-endian order, which is not read" if swapped in VERSIONS else ""
            raise self._error(f"its version is {version}{order}; allowed: {VERSIONS}", len(MAGIC))
        num_tensors = self._number(8, "the number of tensors")
        num_entries = self._number(8, "the number of metadata entries")
        self._claim(num_tensors, 8 + 4 + 8 + 4 + 8, "tensors")
        self._claim(num_entries, 8 + 4 + 1, "entries of metadata")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            at, key = self.at, self._text("a key of metadata", MAX_NAME)
            if key in metadata:
                raise self._error(f"key {key} occurs twice", at)
            metadata[key] = self._value(self._number(4, f"the type of {key}"), key)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
            raise self._error(f"general.alignment is {alignment!s:.40}; allowed: a power of two from 8 on", self.at)
        return GgufFile((self.file,), metadata, self._tensors(num_tensors, alignment))

    def _tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        entries: dict[str, tuple[BlockType, tuple[int, ...], int]] = {}
        for _ in range(count):
            at, name = self.at, self._text("the name of a tensor", MAX_NAME)
            if name in entries:
                raise self._error(f"tensor {name} occurs twice", at)
            entries[name] = self._tensor_entry(name, alignment)
        start = -(-self.at // alignment) * alignment
        tensors, end, last = dict[str, GgufTensor](), 0, ""
        for name, (kind, shape, offset) in sorted(entries.items(), key=lambda entry: entry[1][2]):
            nbytes = math.prod(shape[:-1]) * kind.row_bytes(shape[-1])
            if offset < end:
                raise self._error(f"tensor {name} begins within tensor {last}", start + offset)
            if start + offset + nbytes > self.size:
                raise ConfigError(
                    f"{self.file} ends within tensor {name}: it has {self.size} bytes, and the tensor ends at byte "
                    f"{start + offset + nbytes}; download it again"
                )
            data = np.frombuffer(self.content, np.uint8, nbytes, start + offset)
            data = data.reshape(*shape[:-1], kind.row_bytes(shape[-1]))
            tensors[name], end, last = (
                GgufTensor(name, kind, shape, self.file, start + offset, data),
                offset + nbytes,
                name,
            )
        return {name: tensors[name] for name in entries}

    def _tensor_entry(self, name: str, alignment: int) -> tuple[BlockType, tuple[int, ...], int]:
        """Return the type, the shape and the offset of a tensor."""
        what, at = f"tensor {name}", self.at
        dims = self._number(4, f"the number of dimensions of {what}")
        if not 1 <= dims <= MAX_DIMS:
            raise self._error(f"{what} has {dims} dimensions; allowed: 1 to {MAX_DIMS}", at)
        shape = tuple(self._number(8, f"the shape of {what}") for _ in range(dims))[::-1]
        if 0 in shape:
            raise self._error(f"{what} has shape {list(shape)}; allowed: positive numbers", at)
        at, code = self.at, self._number(4, f"the type of {what}")
        kind = BY_CODE.get(code)
        if kind is None:
            raise self._error(f"{what} has type {UNREAD.get(code, code)}; allowed: {', '.join(TYPES)}", at)
        if shape[-1] % kind.elements:
            raise self._error(
                f"{what} has rows of {shape[-1]} elements, which blocks of {kind.elements} ({kind.name}) do not divide",
                at,
            )
        at, offset = self.at, self._number(8, f"the offset of {what}")
        if offset % alignment:
            raise self._error(f"{what} has offset {offset}, which is not a multiple of {alignment}", at)
        return kind, shape, offset

    def _value(self, code: int, key: str) -> Any:
        if code == STRING:
            return self._text(key)
        if code == ARRAY:
            return self._array(key)
        if code not in SCALARS:
            raise self._error(f"{key} has type {code}; allowed: 0 to {max(SCALARS)}", self.at - 4)
        dtype = SCALARS[code]
        value = np.frombuffer(self._take(dtype.itemsize, key), dtype)[0].item()
        return bool(value) if code == BOOL else value

    def _array(self, key: str) -> Any:
        code, at = self._number(4, f"the type of {key}"), self.at
        length = self._number(8, f"the length of {key}")
        if code == STRING:
            self._claim(length, 8, f"strings in {key}", MAX_STRINGS)
            return [self._text(key) for _ in range(length)]
        if code not in SCALARS:
            raise self._error(f"{key} is an array of type {code}; allowed: numbers, booleans and strings", at - 4)
        dtype = SCALARS[code]
        self._claim(length, dtype.itemsize, f"values in {key}")
        values = np.frombuffer(self.content, dtype, length, self.at)
        self.at += length * dtype.itemsize
        return values.astype(bool) if code == BOOL else values

    def _text(self, what: str, limit: int | None = None) -> str:
        at, length = self.at, self._number(8, f"the length of {what}")
        if limit is not None and length > limit:
            raise self._error(f"{what} has {length} bytes; allowed: up to {limit}", at)
        try:
            return self._take(length, what).decode()
        except UnicodeDecodeError as error:
            raise self._error(f"{what} is not written in UTF-8 ({error.reason})", at) from error

    def _number(self, width: int, what: str) -> int:
        return int.from_bytes(self._take(width, what), "little")

    def _take(self, count: int, what: str) -> bytes:
        end = self.at + count
        if end > self.size:
            raise ConfigError(
                f"{self.file} ends within {what}: {count} bytes are needed from byte {self.at} on, and the file has {self.size}; "
                "download it again"
            )
        taken, self.at = self.content[self.at : end], end
        return taken

    def _claim(self, count: int, least: int, what: str, limit: int | None = None) -> None:
        """Check that ``count`` things of at least ``least`` bytes fit in the rest of the file."""
        most = (self.size - self.at) // least if limit is None else min(limit, (self.size - self.at) // least)
        if count > most:
            raise self._error(f"it claims {count} {what}, and at most {most} are possible", self.at - 8)

    def _error(self, what: str, at: int) -> ConfigError:
        return ConfigError(f"{self.file} is not a valid GGUF file at byte {at}: {what}; download or convert it again")
