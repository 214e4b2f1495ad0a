"""Describe a checkpoint by its files, without reading its weights."""

from __future__ import annotations

import functools
import hashlib
import math
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from dovetail.config.checkpoint import locate, read_json
from dovetail.gguf.directory import gguf_files, is_gguf_directory
from dovetail.gguf.reader import read_gguf


@dataclass(frozen=True)
class Checkpoint:
    """Describe a checkpoint.

    ``size`` is the size of the weights in bytes, ``parameters`` the number of their elements, and ``dtype`` the most
    frequent dtype of the elements, or type of blocks. ``digest`` is a hash of config.json and the names and sizes of the weights.
    """

    config: dict[str, Any]
    family: str
    size: int
    parameters: int
    dtype: str
    digest: str
    modified_at: str
    format: str = "safetensors"

    def details(self) -> dict[str, Any]:
        """Return the ``details`` of Ollama's API."""
        return {
            "parent_model": "",
            "format": self.format,
            "family": self.family,
            "families": [self.family],
            "parameter_size": _short(self.parameters),
            "quantization_level": self.dtype,
        }


@functools.cache
def read_checkpoint(path: str) -> Checkpoint:
    """Return the description of the checkpoint ``model.path``, which is read once. Raises ``ConfigError``."""
    directory = locate(path)
    config = read_json(directory, "config.json")
    config = {**config, **(config.get("text_config") or {})}
    gguf = is_gguf_directory(directory)
    files = gguf_files(directory) if gguf else _weights(directory)
    elements: Counter[str] = Counter()
    for tensor in read_gguf(files[0]).tensors.values() if gguf else ():
        elements[tensor.type.name] += math.prod(tensor.shape)
    for file in () if gguf else files:
        elements.update(_elements(file))
    stats = [file.stat() for file in files]
    newest = max((stat.st_mtime for stat in stats), default=directory.stat().st_mtime)
    return Checkpoint(
        config=config,
        family=config.get("model_type", ""),
        size=sum(stat.st_size for stat in stats),
        parameters=elements.total(),
        dtype=elements.most_common(1)[0][0] if elements else "",
        digest=_digest(directory, files),
        modified_at=datetime.fromtimestamp(newest, UTC).isoformat().replace("+00:00", "Z"),
        format="gguf" if gguf else "safetensors",
    )


def _weights(directory: Path) -> list[Path]:
    """Return the weight files that the engine reads: one file, or the shards that the index names. The list is empty if
    the weights are dummies."""
    single, index = directory / "model.safetensors", "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not (directory / index).is_file():
        return []
    return [directory / name for name in sorted(set(read_json(directory, index)["weight_map"].values()))]


def _elements(file: Path) -> Counter[str]:
    """Count the elements by dtype. A safetensors file begins with the length of its header in 8 bytes, followed by the
    header in JSON."""
    with file.open("rb") as stream:
        header = msgspec.json.decode(stream.read(int.from_bytes(stream.read(8), "little")))
    found: Counter[str] = Counter()
    for name, tensor in header.items():
        if name != "__metadata__":
            found[tensor["dtype"]] += math.prod(tensor["shape"])
    return found


def _digest(directory: Path, files: list[Path]) -> str:
    names = "\n".join(f"{file.name} {file.stat().st_size}" for file in files)
    return hashlib.sha256((directory / "config.json").read_bytes() + names.encode()).hexdigest()


def _short(count: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)
