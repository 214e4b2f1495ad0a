"""Ctrl-C between two steps."""

from __future__ import annotations

import signal
import threading


class DeferredInterrupt:
    """Holds a first Ctrl-C back while it is entered, until ``release`` or the end; a second one is not held back. Python
    calls signal handlers in the main thread only: in others it does nothing."""

    def __enter__(self) -> DeferredInterrupt:
        self._handler = signal.getsignal(signal.SIGINT)
        self._arrived = False
        self._on = callable(self._handler) and threading.current_thread() is threading.main_thread()
        if self._on:
            signal.signal(signal.SIGINT, self._hold)
        return self

    def __exit__(self, *_: object) -> None:
        if self._on:
            signal.signal(signal.SIGINT, self._handler)
        self._deliver()

    def release(self) -> None:
        """Let what was held back take effect, as KeyboardInterrupt where nothing else was asked for."""
        if self._arrived:
            signal.signal(signal.SIGINT, self._hold)
            self._deliver()

    def _hold(self, number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, self._handler)
        self._arrived = True

    def _deliver(self) -> None:
        if self._arrived:
            self._arrived = False
            assert callable(self._handler)
            self._handler(signal.SIGINT, None)
