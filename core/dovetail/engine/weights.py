"""Load a model's weights from a directory of safetensors, without pickle and without code from checkpoints."""

from __future__ import annotations

import logging
import os
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from dovetail.config.checkpoint import read_json
from dovetail.engine.build import WeightFiller, as_module, build_model, expanded_targets
from dovetail.engine.progress import Advance, bytes_progress, size_text
from dovetail.engine.shards import ShardReader, StoredTensor, WeightFill, cut, stored_tensors
from dovetail.engine.tied import untie_different
from dovetail.errors import ConfigError, WeightsError
from dovetail.gguf.directory import is_gguf_directory
from dovetail.interfaces.model import ModelArchitecture, TensorShare, WeightTarget
from dovetail.layers.base import prepare_layers
from dovetail.layers.experts import Experts
from dovetail.layers.linear import Linear

__all__ = ["build_model", "checkpoint_files", "load_weights"]

Progress = Callable[[int, int], None]
"""A function that is called with the number of tensors loaded so far and the number of all tensors."""

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DUMMY_RANGE = 1e-3
"""Dummy weights are uniform between ``-DUMMY_RANGE`` and ``DUMMY_RANGE``. SGLang and vLLM use the same range. The range
matters because the numbers that are multiplied change the power that a GPU draws, and with it the clock rate of large
matrix products."""

MAX_READERS = 8
"""The largest number of threads that read a checkpoint for a GPU. For a CPU there is only one, because the conversion
of dtypes uses several threads already."""

log = logging.getLogger(__name__)


class _Move(NamedTuple):
    """Hold what is read of a tensor of the checkpoint, and the places that it fills."""

    tensor: StoredTensor
    fills: list[WeightFill]


@torch.no_grad()
def load_weights(
    model: ModelArchitecture,
    directory: Path,
    load_format: str = "safetensors",
    seed: int = 0,
    progress: Progress | None = None,
    *,
    shown: bool = True,
) -> None:
    """Fill every parameter of ``model`` from the checkpoint in ``directory``, safetensors or GGUF, or with random numbers if ``load_format``
    is ``dummy``.

    Every tensor of the checkpoint is used exactly once, unless the model ignores it by name. Names, shapes and dtypes
    are checked before the first tensor is read. If the model is divided among ranks, only this rank's share of each
    tensor is read. ``progress`` is called by one thread at a time. With ``shown``, a terminal shows a progress bar.
    Raises ``WeightsError``.
    """
    if load_format == "dummy":
        _fill_dummy(model, seed)
        prepare_layers(as_module(model))
    elif is_gguf_directory(directory):
        from dovetail.engine.gguf_weights import load_gguf

        load_gguf(model, directory, progress, shown=shown)
    else:
        assert load_format == "safetensors", load_format
        _load_checkpoint(model, directory, progress, shown=shown)


def names_reader(directory: Path, load_format: str) -> Callable[[], frozenset[str]] | None:
    """Return what reads the names of the tensors of a checkpoint, or None if weights are not read from safetensors files. Raises
    ``WeightsError`` when it is called."""
    if load_format != "safetensors" or is_gguf_directory(directory):
        return None
    return lambda: frozenset(tensor.name for file in checkpoint_files(directory) for tensor in stored_tensors(file))


def checkpoint_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint: one file, or the shards that its index names. Raises
    ``WeightsError``."""
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if not (directory / INDEX).is_file():
        raise WeightsError(_no_weights(directory))
    files = [directory / name for name in sorted(set(_read_index(directory / INDEX).values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise WeightsError(f"{directory / INDEX} names {', '.join(missing)}, which {directory} does not hold")
    return files


def _load_checkpoint(model: ModelArchitecture, directory: Path, progress: Progress | None, *, shown: bool) -> None:
    files = checkpoint_files(directory)
    if model.tied_weights():
        targets = expanded_targets(model)
        untie_different(model, (_as_known(tensor, model, targets) for file in files for tensor in stored_tensors(file)))
    filler = WeightFiller(model)
    device = next(as_module(model).parameters()).device
    moves = _moves(filler, files)
    left = Counter(move.tensor.name for move in moves)
    filler.check_present(left)
    lock = threading.Lock()
    with bytes_progress("weights", sum(move.tensor.nbytes for move in moves), shown=shown) as advance:

        def arrived(move: _Move) -> None:
            with lock:
                left[move.tensor.name] -= 1
                if not left[move.tensor.name]:
                    filler.used.add(move.tensor.name)
                    if progress is not None:
                        progress(len(filler.used), len(left))

        def advanced(count: int) -> None:
            with lock:
                advance(count)

        _read_all(moves, device, advanced, arrived)
    filler.finish()


def _moves(filler: WeightFiller, files: Sequence[Path]) -> list[_Move]:
    """Return the tensors to read, or this rank's shares of them, and their places, in the order of the files. Raises
    ``WeightsError`` if a tensor does not fit the model or occurs twice."""
    seen: dict[str, Path] = {}
    moves: list[_Move] = []
    for tensor in (
        _as_known(tensor, filler.model, filler.targets) for file in files for tensor in stored_tensors(file)
    ):
        if tensor.name in seen:
            raise WeightsError(f"tensor {tensor.name} is in {seen[tensor.name].name} and again in {tensor.file.name}")
        seen[tensor.name] = tensor.file
        if filler.uses(tensor.name):
            parts: dict[tuple[TensorShare, ...], list[WeightFill]] = {}
            for target, place in filler.places_for(tensor.name, tensor.shape, tensor.dtype):
                parts.setdefault(target.shares, []).append(WeightFill(place, target.transform, target.check))
            moves += [_Move(cut(tensor, shares), fills) for shares, fills in parts.items()]
    return moves


def _as_known(tensor: StoredTensor, model: ModelArchitecture, targets: Container[str]) -> StoredTensor:
    """Return ``tensor`` with the name that the model uses for it, of those of ``targets``. The prefix of the model's body is missing in
    checkpoints that were saved without the head, as is common for embedding models and for GPT-2."""
    name = model.body + tensor.name
    return replace(tensor, name=name) if tensor.name not in targets and name in targets else tensor


def _read_all(moves: Sequence[_Move], device: torch.device, advance: Advance, arrived: Callable[[_Move], None]) -> None:
    """Read the tensors, for a GPU in several threads, which all call ``advance`` and ``arrived``. The first error
    cancels the tensors that no thread has begun to read, and is raised."""
    own = threading.local()
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def read(move: _Move) -> None:
        if not hasattr(own, "reader"):
            own.reader = ShardReader(device)
        # each thread has a current stream of its own; torch.cuda.stream(None) would initialize CUDA
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            own.reader.copy(*move, advance)
        arrived(move)

    if (count := _num_readers(device)) == 1:
        for move in moves:
            read(move)
        return
    with ThreadPoolExecutor(count, thread_name_prefix="weights") as pool:
        try:
            for _ in pool.map(read, moves):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _num_readers(device: torch.device) -> int:
    return 1 if device.type == "cpu" else min(MAX_READERS, os.cpu_count() or 1)


def _read_index(file: Path) -> dict[str, str]:
    try:
        files = read_json(file.parent, file.name)["weight_map"]
        if all(isinstance(name, str) and Path(name).name == name for name in files.values()):
            return files
    except ConfigError as error:
        raise WeightsError(str(error)) from error
    except (KeyError, AttributeError):
        raise WeightsError(
            f"{file} has no weight_map that names the file of each tensor; download or convert it again"
        ) from None
    raise WeightsError(f"{file} names files outside its directory; allowed: plain file names")


def _no_weights(directory: Path) -> str:
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in directory.glob(pattern))
    start = f"{directory} has no {SINGLE} and no {INDEX}"
    if pickled:
        return (
            f"{start}, only pickled weights ({', '.join(pickled[:3])}), which could run code: convert them with "
            "safetensors.torch.save_file, or take a checkpoint that ships safetensors"
        )
    others = sorted(file.name for file in directory.glob("*.safetensors"))
    found = f"; it holds {', '.join(others[:3])}" if others else ""
    return f"{start}{found}; give a directory in Hugging Face layout, or load_format: dummy for random weights"


def _fill_dummy(model: ModelArchitecture, seed: int) -> None:
    """Fill matrices and biases uniformly (see ``DUMMY_RANGE``) and all other vectors, such as norms, with 1, so that
    activations stay finite. On one type of device, every run with the same seed gives the same numbers. A rank gets its
    share of the numbers that a single rank would have, except in parameters whose tensors are cut in several dimensions
    or transformed."""
    start = time.perf_counter()
    module = as_module(model)
    generators: dict[torch.device, torch.Generator] = {}
    shares = _shares(model)
    quantized = _fill_quantized(module, seed)
    for name, parameter in module.named_parameters():
        device = parameter.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        if name in quantized:
            continue
        if parameter.ndim > 1 or name.endswith("bias"):
            _fill_uniform(parameter, shares.get(name), generators[device])
        else:
            parameter.fill_(1.0)
    for device in generators:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    total = sum(parameter.nbytes for parameter in module.parameters())
    log.info("dummy weights: %s in %.1f s", size_text(total), time.perf_counter() - start)


def _fill_quantized(module: nn.Module, seed: int) -> set[str]:
    """Fill the parameters of quantized layers, and return their names."""
    filled: set[str] = set()
    for name, layer in module.named_modules():
        if isinstance(layer, Linear | Experts) and layer.method is not None:
            parameters = {own: getattr(layer, own) for own in layer.method.parameters()}
            device = next(iter(parameters.values())).device
            generator = torch.Generator(device).manual_seed(seed + zlib.crc32(name.encode()))
            layer.method.fill_dummy(parameters, DUMMY_RANGE, generator)
            filled |= {f"{name}.{own}" for own in parameters}
    return filled


class _Sharing(NamedTuple):
    """Describe how the rows of a parameter are cut from the tensors of a checkpoint. ``targets`` are in the order of
    these rows, ``shares`` has the share of each or None, and ``rows`` are the numbers of rows of the whole tensors."""

    targets: list[WeightTarget]
    shares: list[TensorShare | None]
    rows: list[int]


def _shares(model: ModelArchitecture) -> dict[str, _Sharing]:
    """Return the ``_Sharing`` of each parameter of which this rank has a share in one dimension only."""
    targets: dict[str, list[WeightTarget]] = {}
    for target in (one for entry in expanded_targets(model).values() for one in entry):
        targets.setdefault(target.parameter, []).append(target)
    parameters = dict(as_module(model).named_parameters())
    found: dict[str, _Sharing] = {}
    for name, parts in targets.items():
        plain = all(len(part.shares) < 2 and part.transform is None for part in parts)
        if plain and any(part.shares for part in parts):
            parts.sort(key=lambda part: part.start or 0)
            shares = [part.shares[0] if part.shares else None for part in parts]
            sizes = (parameters[name].shape[0] if part.size is None else part.size for part in parts)
            rows = [
                size if share is None or share.dim else share.whole for share, size in zip(shares, sizes, strict=True)
            ]
            found[name] = _Sharing(parts, shares, rows)
    return found


def _fill_uniform(parameter: torch.Tensor, sharing: _Sharing | None, generator: torch.Generator) -> None:
    if sharing is None:
        parameter.uniform_(-DUMMY_RANGE, DUMMY_RANGE, generator=generator)
        return
    shape = [sum(sharing.rows), *parameter.shape[1:]]
    for share in sharing.shares:
        if share is not None and share.dim:
            shape[share.dim] = share.whole
    whole = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
    whole.uniform_(-DUMMY_RANGE, DUMMY_RANGE, generator=generator)
    parts = zip(sharing.targets, sharing.shares, whole.split(sharing.rows), strict=True)
    for (_, start, size, *_), share, part in parts:
        place = parameter if start is None or size is None else parameter[start : start + size]
        place.copy_(part if share is None else part.narrow(share.dim, share.start, share.size))
