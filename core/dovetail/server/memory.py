"""Give freed memory back to the system, and collect garbage when nothing waits for it. glibc keeps what large bodies and
answers have used, often for ever."""

from __future__ import annotations

import ctypes
import gc
import threading

_FREE_BYTES = 16 * 2**20

_DUE = 10
"""Collections of the middle generation after which one of the oldest is due, as by Python's default."""

_LATEST = 1000
"""Those after which one is made at once, if the server never has nothing to do."""


def defer_collections() -> None:
    """Exclude what exists now from garbage collection, and leave collections of the oldest generation to
    ``collect_if_due``. One of them stops all requests for 10 ms and more while a request with thousands of inputs is open,
    and finds hardly any garbage: what requests hold has no cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], _LATEST)


def collect_if_due() -> None:
    """Collect the oldest generation if ``defer_collections`` was called and there may be some garbage. To be called while no request is
    open."""
    if gc.get_threshold()[2] == _LATEST and gc.get_count()[2] > _DUE:
        gc.collect()


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
