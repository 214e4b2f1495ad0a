"""Drive an engine with a scheduler. Only this package joins the two."""

from dovetail.loop.loop import Loop

__all__ = ["Loop"]
