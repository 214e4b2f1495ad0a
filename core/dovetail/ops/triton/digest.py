"""Keep the digest of Triton's own files.

It is part of the key of each kernel in Triton's cache. Triton computes it in every process, from 400 MB, in 0.6 to 0.9 s. Here it is
computed once for an installation, and kept in the cache directory with the sizes and the times of change of these files. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dovetail.atomic_files import write_atomically
from dovetail.ops.triton.kernel_cache import cache_directory, triton_version

log = logging.getLogger(__name__)


def use_kept_digest() -> None:
    """Have Triton use the digest that an earlier process has kept, if its files are the same. Otherwise compute the digest and keep
    it. If that fails, do nothing: Triton raises what is wrong when it needs the digest."""
    import triton
    from triton.runtime import cache

    compute = getattr(cache, "triton_key", None)
    if compute is not None and triton.__file__ is not None:
        try:
            found = kept_digest(Path(triton.__file__).parent, compute)
        except Exception:
            log.debug("the digest of Triton's files is not kept", exc_info=True)
            return
        cache.triton_key = lambda: found


def kept_digest(package: Path, compute: Callable[[], str]) -> str:
    """Return the digest of the files of ``package`` that is kept, or that of ``compute`` if there is none or a file has changed since.
    Raises ``OSError`` if the files cannot be read."""
    states = _states(package)
    name = hashlib.sha256(f"{package} {triton_version()} {sys.version_info[:2]}".encode()).hexdigest()
    file = cache_directory() / "dovetail-digest" / name
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        kept = json.loads(file.read_text())
        if kept["files"] == states and isinstance(kept["digest"], str) and kept["digest"]:
            return kept["digest"]
    digest = compute()
    with suppress(OSError):
        write_atomically(file, json.dumps({"files": states, "digest": digest}))
    return digest


def _states(package: Path) -> dict[str, list[int]]:
    """Return the size and the time of change of each source and each library of a package."""
    states = {}
    for folder, folders, files in os.walk(package, followlinks=True):  # backends of an editable installation are links
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in files:
            if name.endswith((".py", ".so")):
                found = os.stat(os.path.join(folder, name))
                states[os.path.relpath(os.path.join(folder, name), package)] = [found.st_size, found.st_mtime_ns]
    return states
