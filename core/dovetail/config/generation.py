"""Read generation_config.json, in which the authors of a checkpoint recommend how to sample its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.config.checkpoint import read_json
from dovetail.errors import ConfigError, RequestError
from dovetail.sampling_params import SamplingParams

FILE = "generation_config.json"
KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
"""List the keys that become defaults of requests. vLLM reads the same ones."""


def generation_file(setting: str, directory: Path) -> Path | None:
    """Return the file that ``model.generation_config`` selects for the checkpoint in ``directory``; None if it selects
    none, or if ``auto`` finds none. Raises ``ConfigError``."""
    if setting == "none":
        return None
    if setting == "auto":
        return directory / FILE if (directory / FILE).is_file() else None
    given = Path(setting).expanduser()
    file = given / FILE if given.is_dir() else given
    if not file.is_file():
        raise ConfigError(
            f"model.generation_config is {setting!r}, and there is no file {str(file)!r}; allowed: auto, none, a directory "
            f"with a {FILE}, or such a file"
        )
    return file


def sampling_defaults(setting: str, directory: Path) -> Mapping[str, Any]:
    """Return the values that requests have for the sampling parameters that they do not set, by the names of
    ``SamplingParams``. See ``generation_file`` for the parameters. Raises ``ConfigError`` that names the file and the key."""
    file = generation_file(setting, directory)
    if file is None:
        return {}
    tree = read_json(file.parent, file.name)
    found = {key: tree[key] for key in KEYS if tree.get(key) is not None}
    try:
        SamplingParams(**found)
        if found.get("max_new_tokens") == 0:
            raise RequestError("max_new_tokens is 0; allowed: an integer of at least 1")
    except RequestError as error:
        raise ConfigError(f"{file}: {error}. Correct the file, or set model.generation_config to none") from None
    return found
