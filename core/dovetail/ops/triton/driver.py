"""Prepare Triton in threads, while the engine does other things.

Before its first kernel runs, Triton builds its driver, a C module that launches kernels (compiled if the cache is empty), and
needs the digest of its own files (see ``digest``), which takes most of a second if it is not kept.
"""

from __future__ import annotations

import functools
import threading
from contextlib import suppress

import torch

from dovetail.ops.triton.digest import use_kept_digest


@functools.cache
def start_digest() -> threading.Thread:
    """Start the thread that reads or computes the digest of Triton's files. Needs no device. Calls after the first return the same thread."""
    # Import Triton here: two threads that import it at the same time may see modules that are not complete.
    import triton  # noqa: F401

    return _started(threading.Thread(target=use_kept_digest, name="triton-digest", daemon=True))


def start_driver(device: torch.device | None) -> threading.Thread:
    """Start a thread that builds Triton's driver for ``device``, or for the current device if it is None."""
    return _started(threading.Thread(target=_build_driver, args=(device,), name="triton-driver", daemon=True))


def _started(thread: threading.Thread) -> threading.Thread:
    thread.start()
    return thread


def _build_driver(device: torch.device | None) -> None:
    from triton.runtime import driver

    with suppress(Exception):  # the first launch raises what is wrong
        if device is not None:
            torch.cuda.set_device(device)  # that of a new thread is the first device
        driver.active.get_current_target()
