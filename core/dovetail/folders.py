"""Name the user's folders in which Dovetail keeps files."""

from __future__ import annotations

import os
from pathlib import Path


def data_folder() -> Path:
    """Return ``dovetail`` in the user's data folder: ``$XDG_DATA_HOME``, else ``~/.local/share``. It holds what was
    measured and checked on this machine, and the models of ``dovetail pull``. It may not exist."""
    return _folder("XDG_DATA_HOME", ".local/share")


def cache_folder() -> Path:
    """Return ``dovetail`` in the user's cache folder: ``$XDG_CACHE_HOME``, else ``~/.cache``. It may not exist, and may be
    deleted."""
    return _folder("XDG_CACHE_HOME", ".cache")


def _folder(variable: str, default: str) -> Path:
    base = os.environ.get(variable)
    return (Path(base) if base else Path.home() / default) / "dovetail"
