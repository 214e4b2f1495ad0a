"""Give freed memory back to the system. glibc keeps what large bodies and answers have used, often for ever."""

from __future__ import annotations

import ctypes
import threading

_FREE_BYTES = 16 * 2**20


class _MallInfo(ctypes.Structure):
    """See mallinfo2(3)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    )


class MemoryTrimmer:
    """Call malloc_trim(3) whenever free memory has grown by 16 MiB. Does nothing without glibc."""

    def __init__(self) -> None:
        self._kept = 0
        self._thread: threading.Thread | None = None
        try:
            library = ctypes.CDLL(None)
            self._info, self._trim = library.mallinfo2, library.malloc_trim
            self._info.restype = _MallInfo
        except (AttributeError, OSError):
            self._info = self._trim = None

    def poll(self) -> None:
        """Trim, on a thread, if enough memory is free."""
        if self._info is None or (self._thread is not None and self._thread.is_alive()):
            return
        free = self._info().fordblks
        self._kept = min(self._kept, free)
        if free > self._kept + _FREE_BYTES:
            self._thread = threading.Thread(target=self._run, name="dovetail-trim", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        assert self._info is not None
        assert self._trim is not None
        self._trim(0)
        self._kept = self._info().fordblks
