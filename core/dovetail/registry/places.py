"""Name the folder in which Dovetail keeps what it has measured and checked on this machine."""

from __future__ import annotations

import os
from pathlib import Path


def data_folder() -> Path:
    """Return ``dovetail`` in the user's data folder: ``$XDG_DATA_HOME``, else ``~/.local/share``. It may not exist."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "dovetail"
