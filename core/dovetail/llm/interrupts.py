"""Defer Ctrl-C to the time between two steps."""

from __future__ import annotations

import signal
import threading


class DeferredInterrupt:
    """Defer the first Ctrl-C inside the ``with`` block until ``release`` or the end of the block. A second Ctrl-C is not deferred.
    Python calls signal handlers in the main thread only, so in other threads the block changes nothing."""

    def __enter__(self) -> DeferredInterrupt:
        self._handler = signal.getsignal(signal.SIGINT)
        self._arrived = False
        self._active = callable(self._handler) and threading.current_thread() is threading.main_thread()
        if self._active:
            signal.signal(signal.SIGINT, self._defer)
        return self

    def __exit__(self, *_: object) -> None:
        if self._active:
            signal.signal(signal.SIGINT, self._handler)
        self._deliver()

    def release(self) -> None:
        """Deliver a deferred Ctrl-C to the previous handler, which raises KeyboardInterrupt by default."""
        if self._arrived:
            signal.signal(signal.SIGINT, self._defer)
            self._deliver()

    def _defer(self, number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, self._handler)
        self._arrived = True

    def _deliver(self) -> None:
        if self._arrived:
            self._arrived = False
            assert callable(self._handler)
            self._handler(signal.SIGINT, None)
