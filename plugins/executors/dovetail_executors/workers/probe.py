"""Check whether ranks can run in processes of their own here."""

from __future__ import annotations

import platform
import sys

_ORDERED = ("x86_64", "AMD64")


def probe() -> str | None:
    """Return why ranks cannot run in processes here, or None if they can."""
    if sys.platform == "win32":
        return "needs descriptors that a process inherits, which Windows does not have"
    if platform.machine() not in _ORDERED:
        return f"needs a processor on which stores keep their order ({', '.join(_ORDERED)}); this one is {platform.machine()}"
    return None
