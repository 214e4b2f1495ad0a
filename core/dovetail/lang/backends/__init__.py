"""Provide the backends on which programs run: one small ABC, and an implementation for each way to reach a model."""

from dovetail.lang.backends.base import Backend, Features, Generated, ReuseHints

__all__ = ["Backend", "Features", "Generated", "ReuseHints"]
