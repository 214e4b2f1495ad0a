"""Make the folder in which the server and its engine meet through Unix sockets."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from dovetail.errors import EngineError

MOST_BYTES = 107
"""The most bytes of the path of a Unix socket (``sun_path``, without its end)."""
_LONGEST_NAME = 8


def make_socket_folder() -> Path:
    """Make a folder that only its owner can read, in the directory for temporary files, or in /tmp if paths below that
    directory are too long for sockets. Raises ``EngineError``."""
    tried: list[str] = []
    for parent in dict.fromkeys([_temporary(), "/tmp"]):
        try:
            folder = tempfile.mkdtemp(prefix="dovetail-", dir=parent)
        except OSError as error:
            tried.append(f"{parent}: {error.strerror}")
            continue
        if len(os.fsencode(folder)) + 1 + _LONGEST_NAME <= MOST_BYTES:
            return Path(folder)
        os.rmdir(folder)
        tried.append(f"{parent}: paths of sockets would have more than {MOST_BYTES} bytes")
    raise EngineError(
        f"there is no folder for the sockets of the engine ({'; '.join(tried)}); set TMPDIR to a directory with a short path "
        "that can be written"
    )


def _temporary() -> str:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return os.environ.get("TMPDIR", "/tmp")
