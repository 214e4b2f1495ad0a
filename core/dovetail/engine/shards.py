"""Read the tensors of a checkpoint's safetensors files, without pickle and without running code from the checkpoint."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from io import RawIOBase
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open

from dovetail.errors import WeightsError
from dovetail.interfaces.model import TensorShare, WeightCheck, WeightTransform

CHUNK_BYTES = 16 << 20
"""The number of bytes that are read from a file and sent to the device at a time. A reader holds two buffers of this
size."""

MOST_HEADER_BYTES = 100_000_000
"""The largest size of a header that the safetensors library accepts."""

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
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Describe a tensor in a file, or a part of one. ``dtype`` is the name in the file if it is not in ``DTYPES``.

    It has ``nbytes`` bytes, from the file's byte ``offset`` on. If there are ``runs``, they are not in one piece. Each
    run is (bytes, stride), from the outermost dimension to the innermost: pieces of that number of bytes begin at multiples of
    the stride, and the next run divides each piece.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | str
    offset: int
    nbytes: int
    runs: tuple[tuple[int, int], ...] = ()

    def spans(self, start: int, count: int) -> Iterator[tuple[int, int]]:
        """Yield the places in the file, as (offset, number of bytes), of the ``count`` bytes from byte ``start`` on."""
        end = start + count
        while start < end:
            offset, within, run = self.offset, start, self.nbytes
            for run, stride in self.runs:
                index, within = divmod(within, run)
                offset += index * stride
            size = min(run - within, end - start)
            yield offset + within, size
            start += size


def cut(tensor: StoredTensor, shares: Sequence[TensorShare]) -> StoredTensor:
    """Return the part of a whole ``tensor`` that ``shares`` describe."""
    shape, offset, strides = list(tensor.shape), tensor.offset, dict[int, int]()
    for dim, start, size, whole in sorted(shares):
        assert tensor.shape[dim] == whole
        strides[dim] = tensor.nbytes // math.prod(tensor.shape[:dim])
        offset += start * strides[dim] // whole
        shape[dim] = size
    nbytes = tensor.nbytes * math.prod(shape) // math.prod(tensor.shape)
    outer = {dim: math.prod(shape[:dim]) for dim in strides}  # the number of pieces
    runs = tuple((nbytes // outer[dim], stride) for dim, stride in strides.items() if outer[dim] > 1)
    return replace(tensor, shape=tuple(shape), offset=offset, nbytes=nbytes, runs=runs)


def stored_tensors(file: Path) -> list[StoredTensor]:
    """Return the tensors of a file, in the order of their bytes. Raises ``WeightsError`` for a damaged file."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            text = opened.read(min(size, MOST_HEADER_BYTES))
            # checks that the header and the bytes agree. It holds the GIL: a file that does not respond must be waited for before
            with safe_open(file, framework="pt"):
                pass
        header = json.loads(text)
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"{file} is not a valid safetensors file ({error}{_where_it_ends(file)}); download or convert it again"
        ) from error
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


def _where_it_ends(file: Path) -> str:
    """Return a text that names the tensors that a file is too short for; empty if the header itself is wrong."""
    try:
        with file.open("rb") as opened:
            start = 8 + int.from_bytes(opened.read(8), "little")
            whole = opened.seek(0, os.SEEK_END)
            if start > whole:
                return ""
            opened.seek(8)
            header = json.loads(opened.read(start - 8))
        ends = {name: start + entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
        cut_off = sorted((end, name) for name, end in ends.items() if end > whole)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return ""
    if not cut_off:
        return ""
    more = f" and {len(cut_off) - 1} more" if len(cut_off) > 1 else ""
    return f": it has {whole} of {max(ends.values())} bytes and ends before the end of tensor {cut_off[0][1]}{more}"


class WeightFill(NamedTuple):
    """Hold a contiguous place in a parameter, what changes the tensor that fills it, and what checks the place then."""

    place: torch.Tensor
    transform: WeightTransform | None
    check: WeightCheck | None = None


def transformed(name: str, tensor: torch.Tensor, transform: WeightTransform, place: torch.Tensor) -> torch.Tensor:
    """Return what ``transform`` makes of the part of tensor ``name`` that fills ``place``. Raises ``WeightsError`` if it has
    another shape."""
    made = transform.apply(tensor, tuple(place.shape))
    if made.shape != place.shape:
        raise WeightsError(
            f"tensor {name}: {transform} made {list(made.shape)} of {list(tensor.shape)}; expected {list(place.shape)}. The plugin "
            "that defines this transform is wrong"
        )
    return made


def check_filled(name: str, place: torch.Tensor, check: WeightCheck | None) -> None:
    """Raise ``WeightsError`` if ``check`` finds something wrong with ``place``, which tensor ``name`` has filled."""
    if check is not None and (wrong := check(place)) is not None:
        raise WeightsError(f"tensor {name} {wrong}")


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

    @torch.inference_mode()  # it is a setting of each thread, and the places may be inference tensors
    def copy(self, tensor: StoredTensor, fills: Sequence[WeightFill], advance: Callable[[int], None]) -> None:
        """Fill the places with the tensor, and convert the dtype. If there are several, or a transform that reorders elements,
        the device holds the whole tensor a second time. Calls ``advance`` with the number of bytes after each chunk. On
        CUDA the copies run asynchronously on the current stream. Raises ``WeightsError`` if the file ends early, or a check
        finds something."""
        assert isinstance(tensor.dtype, torch.dtype)
        place, transform, check = fills[0]
        if len(fills) == 1 and (transform is None or not transform.reorders):
            self._stream(tensor, place.view(-1), advance)
            check_filled(tensor.name, place, check)
            return
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=place.device)
        self._stream(tensor, whole.view(-1), advance)
        for place, transform, check in fills:
            place.copy_(whole if transform is None else transformed(tensor.name, whole, transform, place))
            check_filled(tensor.name, place, check)

    def _stream(self, tensor: StoredTensor, flat: torch.Tensor, advance: Callable[[int], None]) -> None:
        """Copy the elements of the tensor to ``flat``, in their order."""
        assert isinstance(tensor.dtype, torch.dtype)
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
