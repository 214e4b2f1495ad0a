"""Call functions on a thread, one after another, that the end of the process does not wait for: a read from a file system that
does not respond never returns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")

CLOSE_SECONDS = 1.0
"""How long ``close`` waits for the function that is being called."""


class ReadThread(Generic[T]):
    """Call functions in the order of ``submit``. The thread is started by the first. An object belongs to one thread, except for its
    futures."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._calls: SimpleQueue[tuple[Future[T], Callable[[], T]] | None] = SimpleQueue()
        self._closed = False

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Return the result of a later call. If it is cancelled before the call has begun, there is none."""
        future: Future[T] = Future()
        self._calls.put((future, lambda: function(*args)))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        return future

    def close(self) -> None:
        """Cancel the calls that have not begun, and end the thread. A call that has begun is waited for up to ``CLOSE_SECONDS``, and
        abandoned then: it ends with the process."""
        self._closed = True
        self._calls.put(None)
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while (task := self._calls.get()) is not None:
            future, call = task
            if self._closed:
                future.cancel()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del task, future, call  # the result is not kept until the next call
