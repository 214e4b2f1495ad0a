"""Define the options that commands share, and load the config that they give."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dovetail.config import Config
    from dovetail.registry import Registry

_FILES_HELP = "YAML, TOML or JSON files, merged left to right."

FileOptions = Annotated[list[Path] | None, typer.Option("--config", "-c", metavar="FILE", help=_FILES_HELP)]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", "-s", metavar="KEY=VALUE", help="Override one key, as in scheduler.max_running=8. Repeatable."
    ),
]
Model = Annotated[str | None, typer.Option("--model", "-m", help="Short for --set model.path=...")]
Tp = Annotated[int | None, typer.Option("--tp", help="Short for --set parallel.tp=...: the number of ranks.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def shortcuts(values: Mapping[str, object]) -> list[str]:
    """Return ``--set`` texts for options that were given: ``{"server.port": 1}`` is ``server.port=1``."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items() if value is not None]


def load(files: Sequence[Path] | None, sets: Sequence[str] | None) -> tuple[Config, Registry]:
    """Return the config that files, environment and overrides give, and the registry that validated it. Raises
    ``ConfigError`` and ``PluginError``."""
    from dovetail.registry.setup import setup

    return setup(files or (), sets or (), os.environ)


def load_registry(files: Sequence[Path] | None, sets: Sequence[str] | None) -> Registry:
    """Return the installed components. Only the ``plugins`` section of the config is read; the rest may be wrong.
    Raises ``ConfigError`` and ``PluginError``."""
    from dovetail.config import plugins_section, read
    from dovetail.registry.loader import load_plugins

    return load_plugins(plugins_section(read(files or (), sets or (), os.environ)))
