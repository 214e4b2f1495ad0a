"""Build ``kernels.cpp`` and ``blocks.cpp`` on the machine that runs them, once, and load them.

A library is kept in ``$XDG_CACHE_HOME/dovetail`` (``~/.cache/dovetail``) under a name made of its source, the
compiler and the processor, with its digest beside it. A library that does not match its digest is built again, because
loading an incomplete one would end the process with SIGBUS. It needs Linux and g++. Its OpenMP is the one that torch has loaded: a second OpenMP in the
process would compete with it for the cores.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from dovetail.atomic_files import has_digest, locked, replacement, write_digest

log = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "kernels.cpp"
BLOCKS = Path(__file__).parent / "blocks.cpp"
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
COMPILE_SECONDS = 120


class Library(NamedTuple):
    """Hold the loaded library, or None and the reason. ``text`` describes either case for people."""

    handle: ctypes.CDLL | None
    text: str


@functools.cache
def library(source: Path = SOURCE) -> Library:
    """Return the library of ``source`` of this process, which is built first if the cache does not contain it. Never
    raises."""
    try:
        found = Library(ctypes.CDLL(str(_built(source))), "compiled")
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        found = Library(None, f"torch operations, because the compiled kernels are not available: {error}")
    log.info("CPU kernels of %s: %s", source.name, found.text)
    return found


def _built(source: Path) -> Path:
    if sys.platform != "linux":
        raise RuntimeError(f"they are built on Linux only, and this is {sys.platform}")
    compiler = shutil.which("g++")
    if compiler is None:
        raise RuntimeError("g++ is not on the PATH; install it (Debian: apt install g++)")
    version = _run([compiler, "--version"]).splitlines()[0]
    parts = (source.read_text(encoding="utf-8"), version, *FLAGS, platform.machine(), _processor())
    target = cache_dir() / f"{source.stem}-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:16]}.so"
    if not has_digest(target):
        with locked(target):
            if not has_digest(target):  # another process may have built it meanwhile
                _compile(compiler, source, target)
    return target


def _compile(compiler: str, source: Path, target: Path) -> None:
    with replacement(target) as draft:
        _run([compiler, *FLAGS, str(source), "-o", str(draft)])
    write_digest(target)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[:1])} failed: {(done.stderr or done.stdout).strip()[:500]}")
    return done.stdout


def cache_dir() -> Path:
    """Return the directory of built libraries."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dovetail"


def _processor() -> str:
    """Return the processor features on which ``-march=native`` depends."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
