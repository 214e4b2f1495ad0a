"""Find the chat template of a model among its files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.config.checkpoint import read_json, read_text
from dovetail.errors import ConfigError


def find_source(directory: Path, tokenizer_config: Mapping[str, Any], tools: bool = False) -> str | None:
    """Return the source of the template, from chat_template.jinja, else chat_template.json, else tokenizer_config.json;
    None if there is none. If a model has several templates, return ``tool_use`` if ``tools`` is set and ``default``
    otherwise. Raises ``ConfigError``."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return read_text(file)
    file, found = directory / "tokenizer_config.json", tokenizer_config.get("chat_template")
    if (directory / "chat_template.json").is_file():
        file = directory / "chat_template.json"
        found = read_json(directory, file.name).get("chat_template", ())
    if found is None or isinstance(found, str):
        return found
    try:
        assert isinstance(found, list)
        named: dict[str, Any] = {entry["name"]: entry["template"] for entry in found}
        assert all(isinstance(source, str) for source in named.values())
    except (AssertionError, TypeError, KeyError):
        raise ConfigError(
            f"{file}: chat_template is {found!r:.80}; allowed: a text, or a list of {{'name': ..., 'template': ...}}"
        ) from None
    return (tools and named.get("tool_use")) or named.get("default")


def read_template(path: str) -> str:
    """Return the source of the template in a file (``model.chat_template``). Raises ``ConfigError``."""
    try:
        source = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.chat_template is {path!r}, which cannot be read: {error}") from error
    if not source.strip():
        raise ConfigError(f"model.chat_template is {path!r}, which is empty; give a file with a Jinja template")
    return source


def read_tool_template(directory: Path) -> str | None:
    """Return the source of the template that ``directory`` has for conversations with tools; None if there is none.
    Raises ``ConfigError``."""
    name = "tokenizer_config.json"
    config = read_json(directory, name) if (directory / name).is_file() else {}
    return find_source(directory, config, tools=True)
