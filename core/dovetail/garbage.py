"""Pause Python's collection of garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_collections() -> Iterator[None]:
    """Collect no garbage while a process imports what it runs. Modules stay, and each full collection would visit all that are
    loaded, those of torch included."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
