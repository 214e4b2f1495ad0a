"""Read the tensors of a checkpoint's safetensors files, without pickle and without running code from the checkpoint."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from io import RawIOBase
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open

from dovetail.errors import WeightsError
from dovetail.interfaces.model import TensorShare

CHUNK_BYTES = 16 << 20
"""The number of bytes that are read from a file and sent to the device at a time. A reader holds two buffers of this
size."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Describe a tensor in a file, or a share of one. ``dtype`` is the name in the file if it is not in ``DTYPES``.

    It has ``nbytes`` bytes, from the file's byte ``offset`` on. If ``run`` is set, they are not in one piece: there are
    ``run`` bytes at ``offset`` and at every multiple of ``stride`` bytes after it.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | str
    offset: int
    nbytes: int
    run: int | None = None
    stride: int = 0

    def spans(self, start: int, count: int) -> Iterator[tuple[int, int]]:
        """Yield the places in the file, as (offset, number of bytes), of the ``count`` bytes from byte ``start`` on."""
        if self.run is None:
            yield self.offset + start, count
            return
        end = start + count
        while start < end:
            index, within = divmod(start, self.run)
            size = min(self.run - within, end - start)
            yield self.offset + index * self.stride + within, size
            start += size


def cut(tensor: StoredTensor, share: TensorShare | None) -> StoredTensor:
    """Return the share of ``tensor``, or ``tensor`` itself if ``share`` is None."""
    if share is None:
        return tensor
    dim, start, size, whole = share
    assert tensor.shape[dim] == whole
    shape = (*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])
    outer = math.prod(tensor.shape[:dim])
    entry = tensor.nbytes // (outer * whole)  # bytes of one entry of the dimension
    offset, run = tensor.offset + start * entry, size * entry
    if outer == 1:
        return replace(tensor, shape=shape, offset=offset, nbytes=run)
    return replace(tensor, shape=shape, offset=offset, nbytes=outer * run, run=run, stride=whole * entry)


def stored_tensors(file: Path) -> list[StoredTensor]:
    """Return the tensors of a file, in the order of their bytes. Raises ``WeightsError`` for a damaged file."""
    try:
        with safe_open(file, framework="pt"):  # checks that the header and the bytes agree
            pass
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{file} is not a valid safetensors file ({error}); download or convert it again") from error
    found = [
        StoredTensor(
            file,
            name,
            tuple(entry["shape"]),
            DTYPES.get(entry["dtype"]) or str(entry["dtype"]),
            8 + size + entry["data_offsets"][0],
            entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in header.items()
        if name != "__metadata__"
    ]
    return sorted(found, key=lambda tensor: tensor.offset)


@dataclass(slots=True)
class ShardReader:
    """Copy stored tensors, or shares of them, to their places in the model's parameters. A reader must be used by one thread only.

    The bytes go through two staging buffers, which are pinned for CUDA. One is filled from the file while the other is
    copied to the device. If a dtype must be converted, the device holds at most ``CHUNK_BYTES`` of the tensor twice.
    The host holds only the two buffers.
    """

    device: torch.device
    _buffers: list[torch.Tensor] = field(default_factory=list)
    _sent: list[torch.cuda.Event] = field(default_factory=list)
    _turn: int = 0

    def __post_init__(self) -> None:
        pinned = self.device.type == "cuda"
        self._buffers = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in self._buffers] if pinned else []

    @torch.no_grad()
    def copy(self, tensor: StoredTensor, place: torch.Tensor, advance: Callable[[int], None]) -> None:
        """Fill ``place``, which must be contiguous and have the tensor's shape, and convert the dtype. Calls
        ``advance`` with the number of bytes after each chunk. On CUDA the copies run asynchronously on the current
        stream. Raises ``WeightsError`` if the file ends early."""
        assert isinstance(tensor.dtype, torch.dtype)
        flat = place.view(-1)
        width = tensor.dtype.itemsize
        with tensor.file.open("rb", buffering=0) as file:
            for start in range(0, tensor.nbytes, CHUNK_BYTES):
                count = min(CHUNK_BYTES, tensor.nbytes - start)
                chunk = self._read(file, tensor, start, count).view(tensor.dtype)
                target = flat[start // width : (start + count) // width]
                if chunk.dtype != target.dtype:  # converted on the device, where it is fast
                    chunk = chunk.to(target.device, non_blocking=True)
                target.copy_(chunk, non_blocking=True)
                if self._sent:
                    self._sent[self._turn].record(torch.cuda.current_stream(self.device))
                advance(count)

    def _read(self, file: RawIOBase, tensor: StoredTensor, start: int, count: int) -> torch.Tensor:
        """Return ``count`` bytes of the tensor from byte ``start`` on, in the buffer whose turn it is. Wait first until
        the last copy from this buffer has completed."""
        self._turn = 1 - self._turn
        if self._sent:
            self._sent[self._turn].synchronize()
        buffer = self._buffers[self._turn][:count]
        view, done, descriptor = memoryview(cast("Any", buffer.numpy())), 0, file.fileno()
        for offset, size in tensor.spans(start, count):
            end = done + size
            while done < end:
                got = os.preadv(descriptor, [view[done:end]], offset + size - (end - done))
                if not got:
                    raise WeightsError(f"{tensor.file} ended within tensor {tensor.name}; download it again")
                done += got
        return buffer
