"""Find Triton's cache of compiled kernels, and what it holds for a device. Imports neither torch nor Triton, so that
commands that only report this are quick."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
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


def write_mark(file: Path, settings: str, kernels: int, modules: Iterable[str]) -> None:
    """Write the mark of a set of ``kernels`` kernels that an engine with these ``settings`` has noted. With it are the sizes and the times of change
    of the files on which they depend: those of all loaded modules of the core and of the packages of ``modules``, which define the kernels. Does nothing
    if the directory cannot be written."""
    packages = {"dovetail", *(name.partition(".")[0] for name in modules)}
    names = [name for name in list(sys.modules) if name.partition(".")[0] in packages]
    paths = {getattr(sys.modules.get(name), "__file__", None) for name in names}
    with suppress(OSError):
        sources = {path: _state(path) for path in paths if path is not None}
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({"settings": settings, "kernels": kernels, "sources": sources}))
        partial.replace(file)


def kernels_of_mark(file: Path, settings: str) -> int:
    """Return the number of kernels of a set that need not be noted again: an engine with the same ``settings`` has noted them and
    left none to compile, and the files of ``write_mark`` are the same. Otherwise, or without a mark, return 0."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        found = json.loads(file.read_text())
        if found["settings"] == settings and all(_state(path) == state for path, state in found["sources"].items()):
            return int(found["kernels"])
    return 0


def _state(path: str) -> list[int]:
    found = Path(path).stat()
    return [found.st_size, found.st_mtime_ns]
