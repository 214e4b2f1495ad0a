"""The loop, which holds the two halves of an engine: scheduler and device."""

from dovetail.loop.loop import Loop

__all__ = ["Loop"]
