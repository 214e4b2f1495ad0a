"""Limit how long threads of OpenMP that wait for work keep a processor busy."""

from __future__ import annotations

import os
import sys

SPINS = 5000
"""The checks of a thread that waits before it sleeps, about 0.06 ms: longer than the pauses between the products of a step."""


def limit_spinning() -> None:
    """Set ``GOMP_SPINCOUNT`` for this process and those that it starts, unless the environment sets it or ``OMP_WAIT_POLICY``.

    By default a thread of GNU's OpenMP checks for about 4 ms whether there is work. Two engines on the same cores then take
    the time of each other. Without any check, every product waits until the system has woken the other threads.

    It must be called before torch is imported, because OpenMP reads the environment when it is loaded; later it does nothing.
    """
    if "torch" not in sys.modules and not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
