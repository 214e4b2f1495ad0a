"""Checkpoints of drafters: where they are, and what their files hold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from dovetail.config.checkpoint import locate
from dovetail.errors import ConfigError, WeightsError

if TYPE_CHECKING:
    import torch

    from dovetail.interfaces.speculative import DraftRuntime


def find_checkpoint(runtime: DraftRuntime, path: str, folder: str) -> Path:
    """The directory that ``speculative.path`` stands for; ``auto`` is ``folder`` inside the target's checkpoint. Raises
    ``ConfigError``."""
    if path != "auto":
        return locate(path, "speculative.path")
    directory = runtime.directory / folder
    if not directory.is_dir():
        raise ConfigError(
            f"speculative.path is 'auto', which is the folder {folder!r} of the target's checkpoint; {runtime.directory} has "
            "none: set speculative.path to a directory in Hugging Face layout or a hub name like 'org/name'"
        )
    return directory


def tensor_names(directory: Path) -> frozenset[str]:
    """Names of all tensors in the safetensors files of a checkpoint; empty where there are none (the loader says so)."""
    names: set[str] = set()
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            names.update(tensors.keys())
    return frozenset(names)


def read_tensor(directory: Path, name: str) -> torch.Tensor:
    """A tensor of a checkpoint, as it is, in host memory. Raises ``WeightsError`` if no file has it."""
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118 - no mapping
                return tensors.get_tensor(name)
    raise WeightsError(f"the checkpoint in {directory} lacks tensor {name}")
