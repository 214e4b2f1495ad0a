"""Build the registry and the validated config from the sources of settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.config import Config, plugins_section, read, validate
from dovetail.registry.installed import Registry
from dovetail.registry.loader import PluginEntry, load_plugins


def setup(
    files: Sequence[Path] = (),
    sets: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    entries: Iterable[PluginEntry] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> tuple[Config, Registry]:
    """Read the sources, load the plugins that they allow, then validate the rest with the components of these plugins.

    ``env`` is usually ``os.environ``; without it no variable is read. ``entries`` are the plugins to load instead of
    the installed ones. ``arguments`` are sections given in Python, in the form of a config file, and override every
    other source. Raises ``ConfigError`` and ``PluginError``.
    """
    raw = read(files, sets, env or {}, arguments)
    registry = load_plugins(plugins_section(raw), entries)
    return validate(raw, registry), registry
