"""Tasks of one state, in their order, in a thread that lives while there are any."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class TaskQueue:
    """Runs tasks one after another. ``changed`` is notified whenever one has ended; what tasks write they write under it.

    A task that needs no waiting (``quick``) runs in the caller's thread where nothing is before it. Without ``threaded``
    all do. Tasks raise nothing.
    """

    def __init__(self, threaded: bool = True) -> None:
        self.changed = threading.Condition()
        self._threaded = threaded
        self._tasks: deque[Callable[[], None]] = deque()
        self._busy = False

    def submit(self, task: Callable[[], None], quick: bool = False) -> None:
        """Run ``task`` after those before it."""
        with self.changed:
            idle, self._busy = not self._busy, True
            inline = idle and (quick or not self._threaded)
            if not inline:
                self._tasks.append(task)
        if inline:
            self._run(task)
        elif idle:
            self._start()

    @property
    def idle(self) -> bool:
        """True if nothing is left to do. Hold ``changed`` where it matters."""
        return not self._busy

    def wait(self) -> None:
        """Wait until nothing is left to do."""
        with self.changed:
            self.changed.wait_for(lambda: not self._busy)

    def _run(self, task: Callable[[], None]) -> None:
        """One task, in the caller's thread; others that came meanwhile follow in a thread."""
        try:
            task()
        finally:
            with self.changed:
                rest = bool(self._tasks)
                self._busy = rest
                self.changed.notify_all()
            if rest:
                self._start()

    def _start(self) -> None:
        worker = threading.Thread(target=self._drain, name="dovetail-state", daemon=True)
        try:
            worker.start()
        except RuntimeError:  # there are too many threads: it is done in this one, as somebody waits for it
            self._drain()

    def _drain(self) -> None:
        while True:
            with self.changed:
                if not self._tasks:
                    self._busy = False
                    self.changed.notify_all()
                    return
                task = self._tasks.popleft()
            try:
                task()
            finally:
                with self.changed:
                    self.changed.notify_all()
