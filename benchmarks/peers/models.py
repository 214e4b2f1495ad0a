"""Prepare the models under test: directories with config.json and safetensors and without a tokenizer, for ids as
input and output."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

SHAPES = {
    "tiny": {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "46m": {
        "vocab_size": 32000,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 10,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
}
"""The Llama configs, with tied embeddings and a context of 2048, saved in bfloat16."""


@dataclass(frozen=True, slots=True)
class Model:
    """Describe a model on disk. ``note`` is the origin of its weights."""

    name: str
    path: Path
    vocab_size: int
    note: str


def prepare(name: str, work: Path, python: str, embedded: Path) -> Model:
    """Return the directory of a model under ``work``, which is made once.

    ``tiny`` links to the embedded weights. If they are missing, and for all other models, the weights are random.
    """
    if name == "tiny" and list(embedded.glob("*.safetensors")):
        path, note = link(embedded, work / "models" / "tiny"), "the embedded model"
    else:
        path, note = work / "models" / f"{name}-random", "random weights"
        if not path.is_dir():
            make_random(path, SHAPES[name], python)
    vocab_size = json.loads((path / "config.json").read_text())["vocab_size"]
    return Model(name, path, vocab_size, note)


def link(source: Path, target: Path) -> Path:
    """Return ``target`` with links to the config and weights of ``source``, without its tokenizer."""
    target.mkdir(parents=True, exist_ok=True)
    for file in [source / "config.json", *source.glob("*.safetensors*")]:
        place = target / file.name
        place.unlink(missing_ok=True)
        place.symlink_to(file.resolve())
    return target


def make_random(path: Path, shape: dict[str, int], python: str) -> None:
    """Save random weights in a separate process, so that the measuring process never loads torch."""
    partial = path.with_name(path.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    command = [python, "-m", "peers.make_model", str(partial), json.dumps(shape)]
    subprocess.run(command, cwd=Path(__file__).parent.parent, check=True)
    partial.rename(path)
