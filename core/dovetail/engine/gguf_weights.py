"""Load weights from a GGUF file: dequantized, or as blocks if a layer stores them so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from dovetail.engine.build import WeightFiller, as_module
from dovetail.engine.progress import Advance, bytes_progress
from dovetail.engine.shards import check_filled, transformed
from dovetail.errors import ConfigError, WeightsError
from dovetail.gguf.blocks import as_torch, dequantize
from dovetail.gguf.changes import PairedRows
from dovetail.gguf.directory import gguf_files
from dovetail.gguf.mapping import MappedTensor, mapped_tensors
from dovetail.gguf.reader import GgufTensor, read_gguf
from dovetail.interfaces.model import ModelArchitecture, TensorShare, WeightTarget

CHUNK_ELEMENTS = 8 << 20
"""The largest number of elements that are dequantized at a time where rows can be taken one after another."""


class _Fill(NamedTuple):
    """Hold a destination of a tensor, whether it is filled with blocks as bytes, and the tensor."""

    mapped: MappedTensor
    target: WeightTarget
    place: torch.Tensor
    raw: bool


def load_gguf(
    model: ModelArchitecture, directory: Path, progress: Callable[[int, int], None] | None, *, shown: bool
) -> None:
    """Fill every parameter of ``model`` from the GGUF file of ``directory`` (``gguf.directory``). Parameters of uint8
    get the blocks of their rows as bytes, all others dequantized numbers in their dtype. If the model is divided among
    ranks, rows of other ranks are not dequantized. See ``load_weights`` for the parameters. Raises ``WeightsError``."""
    try:
        tensors = mapped_tensors(read_gguf(gguf_files(directory)[0]))
    except ConfigError as error:
        raise WeightsError(str(error)) from error
    filler = WeightFiller(model)
    device = next(as_module(model).parameters()).device
    fills = {tensor.name: list(_fills(filler, tensor)) for tensor in tensors if _is_read(filler, tensor)}
    filler.check_present(fills)
    total = sum(fill.mapped.nbytes for entry in fills.values() for fill in entry)
    with bytes_progress("weights", total, shown=shown) as advance:
        for name, entry in fills.items():
            for fill in entry:
                _fill(fill, device, advance)
            filler.used.add(name)
            if progress is not None:
                progress(len(filler.used), len(fills))
    filler.finish()


def _is_read(filler: WeightFiller, tensor: MappedTensor) -> bool:
    return tensor.name in filler.targets if tensor.optional else filler.uses(tensor.name)


def _fills(filler: WeightFiller, tensor: MappedTensor) -> Iterator[_Fill]:
    """Yield the destinations of a tensor. Raises ``WeightsError`` if its shape does not fit."""
    places = [filler.place(target).dtype for target in filler.targets[tensor.name]]
    raw = bool(places) and all(dtype == torch.uint8 for dtype in places)
    shape, dtype = (tensor.raw_shape, torch.uint8) if raw else (tensor.shape, torch.float32)
    if shape is None:
        raise WeightsError(
            f"tensor {tensor.name} is made of {', '.join(source.name for source in tensor.sources)}, whose blocks cannot be used as "
            "they are; set quantization: none"
        )
    for target, place in filler.places_for(tensor.name, shape, dtype):
        yield _Fill(tensor, target, place, raw)


def _fill(fill: _Fill, device: torch.device, advance: Advance) -> None:
    mapped, target, place, raw = fill
    plain = target.transform is None or not target.transform.reorders
    if plain and len(mapped.shape) == 2 and (mapped.change is None or isinstance(mapped.change, PairedRows)):
        _fill_rows(fill, device)
    else:
        parts = [_read(source, slice(None), raw, device) for source in mapped.sources]
        part = parts[0] if mapped.change is None else mapped.change.apply(parts)
        part = _cut(part, target.shares)
        place.copy_(
            part if target.transform is None else transformed(mapped.name, part.contiguous(), target.transform, place)
        )
    check_filled(mapped.name, place, target.check)
    advance(mapped.nbytes)


def _fill_rows(fill: _Fill, device: torch.device) -> None:
    """Fill a place with rows of a matrix, of which only a part is dequantized at a time."""
    mapped, target, place, raw = fill
    (source,) = mapped.sources
    wanted = {share.dim: share for share in target.shares}
    rows = range(mapped.shape[0])
    if 0 in wanted:
        rows = rows[wanted[0].start : wanted[0].start + wanted[0].size]
    columns = [share for share in target.shares if share.dim]
    order = mapped.change.order(mapped.shape[0]) if isinstance(mapped.change, PairedRows) else None
    flat, done = place.view(-1), 0
    step = max(1, CHUNK_ELEMENTS // mapped.shape[1])
    for start in range(0, len(rows), step):
        chosen = rows[start : start + step]
        taken = slice(chosen.start, chosen.stop) if order is None else order[chosen.start : chosen.stop]
        part = _cut(_read(source, taken, raw, device), columns)
        flat[done : done + part.numel()].copy_(part.reshape(-1))
        done += part.numel()


def _read(source: GgufTensor, rows: slice | np.ndarray, raw: bool, device: torch.device) -> torch.Tensor:
    """Return rows of a tensor of the file, dequantized in float32, or with ``raw`` their bytes."""
    data = as_torch(source.data[rows]).to(device)
    return data if raw else dequantize(data, source.type)


def _cut(tensor: torch.Tensor, shares: tuple[TensorShare, ...] | list[TensorShare]) -> torch.Tensor:
    for share in shares:
        tensor = tensor.narrow(share.dim, share.start, share.size)
    return tensor
