"""Refuse keys that are given twice."""

from __future__ import annotations

from collections.abc import Iterable


def refuse_repeated(keys: Iterable[object], where: str) -> None:
    """Raise ``ValueError`` if a key is given twice. ``where`` names the place in the error."""
    seen: list[object] = []
    for key in keys:
        if key in seen:
            raise ValueError(f"{where}: key {key!r} is given twice; keep one")
        seen.append(key)
