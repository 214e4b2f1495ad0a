"""Find the directory of a model on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dovetail.config.hub import hub_model
from dovetail.config.hub_files import parse_hub_name
from dovetail.config.pulled import pullable_models
from dovetail.errors import ConfigError
from dovetail.gguf.directory import checkpoints_in, gguf_directory, is_gguf_directory
from dovetail.gguf.files import piece_files

EMBEDDED = {"tiny": Path(__file__).parent.parent / "assets" / "tiny"}


def locate(path: str, key: str = "model.path") -> Path:
    """Return the local directory of a model: an embedded name, a directory, a GGUF file, for which a directory is written
    in the user's cache folder, a model that was pulled, or a hub name (``parse_hub_name``), which is downloaded once
    if huggingface-hub is installed and a network exists. ``key`` is the setting that errors name. Raises
    ``ConfigError``."""
    if path in EMBEDDED:
        return EMBEDDED[path]
    local = Path(path).expanduser()
    if local.is_dir():
        return _of_directory(local, key)
    if local.is_file() and (local.suffix == ".gguf" or piece_files(local)):
        return gguf_directory(local)
    if path in pullable_models():
        return _of_pulled(path, key)
    if parse_hub_name(path) is not None:
        return _of_hub(path, key)
    raise ConfigError(
        f"{key} is {path!r}, which is not a directory; allowed: a directory in Hugging Face layout, a GGUF file, a hub name "
        f"like 'org/name' (with a revision 'org/name@main', with a GGUF file 'org/name:Q4_K_M'), an embedded model ({', '.join(EMBEDDED)}), or one that `dovetail pull` "
        f"takes ({', '.join(pullable_models())})"
    )


def _of_pulled(name: str, key: str) -> Path:
    """Return the directory that presents a pulled model. Raises ``ConfigError`` if it has not been pulled."""
    file = pullable_models()[name].path
    if not file.is_file():
        raise ConfigError(f"{key} is {name!r}, which has not been pulled; run: dovetail pull {name}")
    return gguf_directory(file)


def _of_directory(directory: Path, key: str) -> Path:
    """Return ``directory``, or the one that presents the only GGUF checkpoint in it if it has no config.json."""
    if (directory / "config.json").exists() or is_gguf_directory(directory):
        return directory
    found = checkpoints_in(directory)
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ConfigError(f"{key} is {str(directory)!r}, which has several GGUF files: {names}; give one of them")
    return gguf_directory(found[0]) if found else directory


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """Read a JSON file of the checkpoint. Raises ``ConfigError`` if it is missing or malformed."""
    file = directory / name
    if not file.is_file():
        raise ConfigError(f"{directory} has no {name}; a model directory in Hugging Face layout is expected")
    try:
        tree = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:  # a ConfigError of read_text too
        what = error if isinstance(error, ValueError) else "its values are nested too deeply"
        raise error if isinstance(error, ConfigError) else ConfigError(f"{file} is not valid JSON: {what}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} holds {tree!s:.40} instead of an object; download or convert the checkpoint again")
    return tree


def read_text(file: Path) -> str:
    """Read a text file of the checkpoint. Raises ``ConfigError`` if it cannot be read, or is not written in UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def _of_hub(text: str, key: str) -> Path:
    """Return the directory of a model of the hub, which is downloaded unless it is in the hub's cache."""
    try:
        import huggingface_hub  # noqa: F401 # pyright: ignore[reportMissingImports, reportUnusedImport]
    except ImportError as error:
        raise ConfigError(
            f"{key} is {text!r}, which is not a local directory, and hub names need huggingface-hub: pip install 'dovetail[hub]'. "
            f"Without a hub: {_without_hub()}"
        ) from error
    try:
        found = hub_model(text, weights=key != "model.tokenizer")
    except ConfigError as error:
        raise ConfigError(
            f"{key} is {text!r}, which is not a local directory or file: {error}. A model that needs no hub: {_without_hub()}"
        ) from error
    return gguf_directory(found) if found.is_file() else found


def _without_hub() -> str:
    return " or ".join(f"dovetail pull {name}" for name in pullable_models())
