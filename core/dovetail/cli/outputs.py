"""Check the files that a command writes when its work is done."""

from __future__ import annotations

import os
from pathlib import Path

from dovetail.errors import ConfigError


def check_writable(files: dict[str, Path | None]) -> None:
    """Check, before the work begins, that the file of each option can be written. Make missing folders. Raises
    ``ConfigError``."""
    for option, file in files.items():
        if file is None:
            continue
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            was_there = file.exists()
            with file.open("ab"):
                pass
            if not was_there:
                os.unlink(file)
        except OSError as error:
            raise ConfigError(f"{option}: {file} cannot be written: {error.strerror}; choose another file") from error
