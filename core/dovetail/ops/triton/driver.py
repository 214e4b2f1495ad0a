"""Start Triton in threads, while the engine does other things.

Before its first kernel runs, Triton makes what launches kernels on a device (with an empty cache, this compiles C), and
needs the digest of its own files (see ``digest``), which takes most of a second if it is not kept.
"""

from __future__ import annotations

import functools
import threading
from contextlib import suppress

import torch

from dovetail.ops.triton.digest import use_kept_digest


class TritonStart:
    """Start Triton for ``device``, or for the current device if it is None."""

    def __init__(self, device: torch.device | None) -> None:
        # here, because two threads that import Triton at the same time may see modules that are not complete
        import triton  # noqa: F401

        self._driver = threading.Thread(target=_make_driver, args=(device,), name="triton-driver", daemon=True)
        self._digest = threading.Thread(target=use_kept_digest, name="triton-digest", daemon=True)
        self._driver.start()
        self._digest.start()

    def wait_for_driver(self) -> None:
        """Wait until the specializations of kernels can be computed."""
        self._driver.join()

    def wait(self) -> None:
        """Wait until kernels can be loaded from the cache."""
        self._driver.join()
        self._digest.join()


@functools.cache
def start_triton(device: torch.device | None) -> TritonStart:
    """Start Triton for ``device``. Calls after the first return the same object."""
    return TritonStart(device)


def _make_driver(device: torch.device | None) -> None:
    from triton.runtime import driver

    with suppress(Exception):  # the first launch raises what is wrong
        if device is not None:
            torch.cuda.set_device(device)  # that of a new thread is the first device
        driver.active.get_current_target()
