"""Observe exceptions that a program's own ``except`` would hide from its trace."""

from __future__ import annotations

import sys
from types import FrameType, TracebackType
from typing import Any, Self

from dovetail.lang.state_interface import program_line


class ExceptionWatch:
    """Observe the exceptions that Python code of this thread raises while the context is active.

    It observes exceptions of the type ``stop``, whether or not the program catches them. A ``TypeError`` whose message
    contains ``name`` (the class of an object that a function received in place of text) is replaced by a ``stop``.
    ``seen`` is the message of the first observed exception. While the context is active, the trace function of a
    debugger or of a coverage tool is not called.
    """

    def __init__(self, stop: type[BaseException], name: str) -> None:
        self.seen: str | None = None
        self._stop, self._name = stop, name

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        frame.f_trace_lines = False
        return self._trace_exceptions

    def _trace_exceptions(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event != "exception":
            return self._trace_exceptions
        kind, error, _ = arg
        if issubclass(kind, TypeError) and self._name in str(error):
            self.seen = self.seen or f"{program_line()} needs the value of a symbol: {error}"
            raise self._stop(self.seen)
        if issubclass(kind, self._stop):
            self.seen = self.seen or str(error)
        return self._trace_exceptions
