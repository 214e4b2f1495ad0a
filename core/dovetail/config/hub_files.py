"""Read names of models on the Hugging Face hub, and choose the files of a repository that are needed. Imports nothing heavy."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import PurePosixPath
from typing import NamedTuple

from dovetail.errors import ConfigError
from dovetail.gguf.files import SHARD

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

_NAME = re.compile(
    r"(?:(?:hf\.co|huggingface\.co)/)?(?P<repository>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w.-][\w./-]*?))?"
    r"(?:/(?P<file>[^:@]+\.gguf)|:(?P<label>[\w./-]+))?"
)
_SMALL = ("*.json", "tokenizer*", "*.jinja", "1_Pooling/config.json")
"""The files that are read beside the weights: settings, tokenizer, chat template, and how the model pools."""
_LISTED = 12


class HubName(NamedTuple):
    """Name a model on the hub. ``revision`` is a branch, a tag or a commit, by default the newest commit. ``gguf`` is a
    GGUF file of the repository, or the label of a quantization such as Q4_K_M."""

    repository: str
    revision: str | None
    gguf: str | None


def parse_hub_name(text: str) -> HubName | None:
    """Return what ``text`` names on the hub, or None if it cannot be such a name: ``org/name``, ``org/name@revision``,
    ``org/name:Q4_K_M`` and ``org/name/file.gguf``, as llama.cpp and Ollama write them; hf.co/ may precede."""
    found = _NAME.fullmatch(text)
    if found is None or found["repository"].endswith(".gguf"):
        return None
    return HubName(found["repository"], found["revision"], found["file"] or found["label"])


def small_files(files: Iterable[str]) -> list[str]:
    """Return the files at the top of a repository that are read beside the weights."""
    return [name for name in files if any(_is_match(name, pattern) for pattern in _SMALL)]


def folders_with_models(files: Collection[str]) -> list[str]:
    """Return the folders of a repository whose safetensors are a model: its top, ``""``, and folders in it that have a
    config.json of their own, as those of drafters. ``original`` holds the same model once more in another layout."""
    inner = {name.rpartition("/")[0] for name in files if name.count("/") == 1 and name.endswith("/config.json")}
    folders = ["", *(f"{folder}/" for folder in sorted(inner - {"original"}))]
    return [folder for folder in folders if folder + SINGLE in files or folder + INDEX in files]


def gguf_of(name: HubName, files: Iterable[str]) -> list[str]:
    """Return the GGUF files that ``name`` means, all parts of a split one, in order. Raises ``ConfigError`` if there is none, or
    if there are several and the name does not say which."""
    checkpoints = _checkpoints(files)
    if not checkpoints:
        raise ConfigError(f"{name.repository} has no GGUF files; leave out {name.gguf!r}")
    found = [start for start, parts in checkpoints.items() if name.gguf is None or _is_named(start, parts, name.gguf)]
    if len(found) == 1:
        return checkpoints[found[0]]
    every = [_shown(parts[0]) for start, parts in checkpoints.items() if not found or start in found]
    listed = ", ".join(every[:_LISTED]) + (f" and {len(every) - _LISTED} more" if len(every) > _LISTED else "")
    example = f"{name.repository}/{checkpoints[next(iter(checkpoints))][0]}"
    what = "has no GGUF file" if not found else "has several GGUF files"
    named = f" that {name.gguf!r} names" if name.gguf is not None else ""
    raise ConfigError(
        f"{name.repository} {what}{named}: {listed}; give the label at the end of one of these names, as in org/name:Q4_K_M, "
        f"or the file: {example}"
    )


def _checkpoints(files: Iterable[str]) -> dict[str, list[str]]:
    """Return the files of each GGUF checkpoint, by their name without the end. Encoders of images (mmproj) are left out."""
    found: dict[str, list[str]] = {}
    for path in sorted(files):
        name = PurePosixPath(path).name
        if not name.endswith(".gguf") or name.startswith("mmproj"):
            continue
        split = SHARD.fullmatch(path)
        found.setdefault(split["start"] if split else path.removesuffix(".gguf"), []).append(path)
    return found


def _is_named(start: str, parts: list[str], given: str) -> bool:
    """Return whether a checkpoint is the file ``given``, or has the label ``given`` at the end of its name or as its folder."""
    if given.endswith(".gguf"):
        return given in parts or given in [PurePosixPath(part).name for part in parts]
    *folders, name = start.lower().split("/")
    return re.search(rf"(?:^|[-._]){re.escape(given.lower())}$", name) is not None or given.lower() in folders


def _shown(path: str) -> str:
    return re.sub(r"-\d{5}-of-\d{5}(?=\.gguf$)", "", path)


def _is_match(name: str, pattern: str) -> bool:
    path = PurePosixPath(name)
    return path.match(pattern) and len(path.parts) == len(PurePosixPath(pattern).parts)
