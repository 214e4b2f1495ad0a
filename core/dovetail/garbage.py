"""Pause Python's collection of garbage. Several threads may pause it at the same time: it goes on when the last of them resumes it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


def pause() -> None:
    """Collect no garbage until ``resume`` is called as often as this function. ``gc.collect`` still collects."""
    global _pauses, _was_enabled
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1


def resume() -> None:
    """End a pause. If it is the last one, collections go on, unless they were disabled before the first."""
    global _pauses
    with _lock:
        _pauses -= 1
        if _pauses == 0 and _was_enabled:
            gc.enable()


@contextmanager
def pause_collections() -> Iterator[None]:
    """Pause collections in the block, in all threads. Used while modules are imported: they stay, and each full collection would visit
    all that are loaded, those of torch included."""
    pause()
    try:
        yield
    finally:
        resume()
