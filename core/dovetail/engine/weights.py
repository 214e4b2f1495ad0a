"""From a directory of safetensors to a model that is ready to run. No pickle, no code from checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from dovetail.errors import WeightsError
from dovetail.interfaces.model import ModelArchitecture
from dovetail.layers.base import prepare_layers
from dovetail.layers.build import WeightFiller, as_module, build_model

__all__ = ["build_model", "checkpoint_files", "load_weights"]

Progress = Callable[[int, int], None]
"""Called with the number of tensors loaded so far, and of all."""

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DUMMY_STD = 0.02


@torch.no_grad()
def load_weights(
    model: ModelArchitecture,
    directory: Path,
    load_format: str = "safetensors",
    seed: int = 0,
    progress: Progress | None = None,
) -> None:
    """Fill every parameter of ``model``, from the checkpoint in ``directory`` or (``dummy``) with random numbers.

    Every tensor of the checkpoint is used exactly once, unless the model ignores it by name. Raises ``WeightsError``.
    """
    if load_format == "dummy":
        _fill_dummy(as_module(model), seed)
        prepare_layers(as_module(model))
    else:
        assert load_format == "safetensors", load_format
        _load_checkpoint(model, directory, progress)


def checkpoint_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: one file, or the shards that its index names. Raises ``WeightsError``."""
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if not (directory / INDEX).is_file():
        raise WeightsError(_no_weights(directory))
    files = [directory / name for name in sorted(set(_read_index(directory / INDEX).values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise WeightsError(f"{directory / INDEX} names {', '.join(missing)}, which {directory} does not hold")
    return files


def _load_checkpoint(model: ModelArchitecture, directory: Path, progress: Progress | None) -> None:
    filler = WeightFiller(model)
    device = str(next(as_module(model).parameters()).device)
    seen: dict[str, Path] = {}
    for file in checkpoint_files(directory):
        for name, read in _tensors(file, device):
            if name in seen:
                raise WeightsError(f"tensor {name} is in {seen[name].name} and again in {file.name}")
            seen[name] = file
            filler.fill(name, read)
            if progress is not None:
                progress(len(filler.used), len(filler.targets))
    filler.finish()


def _tensors(file: Path, device: str) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    try:
        with safe_open(file, framework="pt", device=device) as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                yield name, lambda name=name: opened.get_tensor(name)
    except SafetensorError as error:
        raise WeightsError(f"{file} is no valid safetensors file ({error}); download or convert it again") from error


def _read_index(file: Path) -> dict[str, str]:
    try:
        files = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        if all(isinstance(name, str) and Path(name).name == name for name in files.values()):
            return files
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{file} is no valid index: {type(error).__name__}: {error}") from error
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


def _fill_dummy(module: nn.Module, seed: int) -> None:
    """Matrices and biases from N(0, 0.02), norms 1: activations stay finite. The same on every run of a device type."""
    generators: dict[torch.device, torch.Generator] = {}
    for name, parameter in module.named_parameters():
        device = parameter.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        if parameter.ndim > 1 or name.endswith("bias"):
            parameter.normal_(0.0, DUMMY_STD, generator=generators[device])
        else:
            parameter.fill_(1.0)
