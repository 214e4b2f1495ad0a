"""Find Triton's cache of compiled kernels, and what it holds for a device. Imports neither torch nor Triton, so that
commands that only report this are quick."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import sys
from pathlib import Path

_DISTRIBUTIONS = ("triton", "pytorch-triton")


def cache_directory() -> Path:
    """Return the directory of Triton's cache. If TRITON_CACHE_DIR is not set, set it to a directory in the user's cache
    directory (XDG_CACHE_HOME, by default ~/.cache). Triton keys the cache by its version, the kernels' source and the
    device's capability."""
    if not os.environ.get("TRITON_CACHE_DIR"):
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        os.environ["TRITON_CACHE_DIR"] = str(home / "dovetail" / "triton")
    return Path(os.environ["TRITON_CACHE_DIR"])


@functools.cache
def triton_version() -> str:
    """Return the version of the installed Triton, or an empty text."""
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def mark_file(capability: int, *parts: str) -> Path:
    """Return the file whose existence means that a kernel, or a set of kernels, is in the cache: compiled by this version
    of Triton for a device of ``capability`` (90 stands for 9.0)."""
    text = json.dumps([*parts, triton_version(), capability, sys.version_info[:2]])
    return cache_directory() / "dovetail-ahead" / hashlib.sha256(text.encode()).hexdigest()
