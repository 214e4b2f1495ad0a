"""Call functions that read files on a thread, one after another. A read from a file system that does not respond never returns:
neither the end of the process nor later calls wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from dovetail.errors import WeightsError

T = TypeVar("T")

CLOSE_SECONDS = 1.0
"""How long ``close`` waits for the function that is being called."""
HUNG_SECONDS = 60.0
"""How long a file may not respond before the call that reads it is abandoned."""

Note = Callable[[Path], None]
"""A function that a call calls whenever it is about to read from a file."""


def note_nothing(file: Path) -> None:
    """Do nothing, for reads that nothing watches."""


class Read(Future[T]):
    """Hold the result of a call of ``thread``, and what it reads."""

    def __init__(self, thread: ReadThread[T]) -> None:
        super().__init__()
        self._thread = thread
        self.file: Path | None = None
        self.progress = 0.0  # the time of the last progress

    def note(self, file: Path) -> None:
        """Note that the call is about to read from ``file``. Raises ``CancelledError``, which ends it, if it was abandoned."""
        if self._thread.closed or not self.running():
            raise CancelledError
        self.file, self.progress = file, time.monotonic()


class ReadThread(Generic[T]):
    """Call functions in the order of ``submit``. The thread is started by the first, and replaced if a call hangs. An object belongs to
    one thread, except for its futures."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._calls: SimpleQueue[tuple[Read[T], Callable[[], T]] | None] = SimpleQueue()
        self.closed = False

    def submit(self, function: Callable[..., T], *args: Any) -> Read[T]:
        """Return the result of a later call of ``function``, which gets a ``Note`` before ``args``. If it is cancelled before the
        call has begun, there is none."""
        read: Read[T] = Read(self)
        self._calls.put((read, lambda: function(read.note, *args)))
        if self._thread is None:
            self._start()
        return read

    def end_if_hung(self, read: Read[T]) -> None:
        """Abandon a call that has made no progress for ``HUNG_SECONDS``: its error is a ``WeightsError``, what it returns later is
        dropped, and another thread makes the next calls."""
        if read.running() and time.monotonic() - read.progress > HUNG_SECONDS:
            text = f"{read.file} has not responded for {HUNG_SECONDS:g} seconds; check its file system, and load the adapter again"
            with suppress(InvalidStateError):  # it has just ended
                read.set_exception(WeightsError(text))
                self._start()

    def close(self) -> None:
        """Cancel the calls that have not begun, and end the thread. A call that has begun is waited for up to ``CLOSE_SECONDS``, and
        abandoned then: it ends with the process, or when it is about to read more."""
        self.closed = True
        self._calls.put(None)
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (task := self._calls.get()) is not None:
            read, call = task
            if self.closed:
                read.cancel()
            read.progress = time.monotonic()
            if read.set_running_or_notify_cancel():
                try:
                    try:
                        read.set_result(call())
                    except BaseException as error:
                        read.set_exception(error)
                except InvalidStateError:  # it was abandoned, and another thread makes the next calls
                    return
            del task, read, call  # the result is not kept until the next call
