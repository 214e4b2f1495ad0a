"""Tell a shortage of memory, threads or processes, which passes, from failures that do not.

Libraries written in C++ or Rust often end the process if they get no memory while they initialize. Therefore the memory that
they are about to need is requested from the system, and given back, before they are called.
"""

from __future__ import annotations

import errno
import mmap
import sys

from dovetail.errors import DovetailError, QueueFullError

_MIB = 2**20
BUILD_BYTES = 256 * _MIB
"""Memory and addresses that building a backend and its threads may take, without what depends on the vocabulary."""
BUILD_BYTES_PER_TOKEN = 1024
COMPILE_BYTES = 64 * _MIB
"""Memory that reading or compiling a constraint may take in this process, without what depends on its size."""
LOAD_BYTES_PER_BYTE = 32
"""Memory that reading a compiled constraint takes for each byte of its data, most of it for a moment: it is JSON."""

_NUMBERS = frozenset({errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE})
_TEXTS = (
    "bad_alloc",
    "start new thread",
    "annot allocate memory",
    "resource temporarily unavailable",
    "failed to map segment",
    "out of memory",
)


def is_shortage(error: BaseException | None) -> bool:
    """Return True if ``error``, or an error that caused it, reports that memory, threads, processes or file descriptors are
    short."""
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _NUMBERS):
            return True
        if not isinstance(error, DovetailError) and any(text in str(error).lower() for text in _TEXTS):
            return True
        error = error.__cause__
    return False


def require_memory(count: int) -> None:
    """Raise ``MemoryError`` if the system does not grant ``count`` more bytes to this process now. A limit of a container is
    not seen here: it ends the process when it is exceeded."""
    if sys.platform == "win32":
        return
    try:
        granted = mmap.mmap(-1, count, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise MemoryError(f"{count // _MIB} MiB are not available") from error
    granted.close()


def shortage_error(error: BaseException) -> QueueFullError:
    """Return the error for a client whose constraint is refused because of a shortage."""
    return QueueFullError(
        f"memory or threads are short, so that the constraint could not be compiled ({type(error).__name__}: {error}); retry later"
    )
