"""Run the tasks of one state in order, in a thread that exists only while there are tasks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class TaskQueue:
    """Run tasks one after another. ``changed`` is notified whenever a task has ended; tasks hold it while they write.

    A task that does not wait (``quick``) runs in the caller's thread if no task is before it. Without ``threaded``,
    every task runs in the caller's thread. Tasks raise nothing.
    """

    def __init__(self, threaded: bool = True) -> None:
        self.changed = threading.Condition()
        self._threaded = threaded
        self._tasks: deque[Callable[[], None]] = deque()
        self._busy = False

    def submit(self, task: Callable[[], None], quick: bool = False) -> None:
        """Run ``task`` after the tasks before it."""
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
        """Return whether no task is left. Hold ``changed`` if the answer must stay true."""
        return not self._busy

    def wait(self) -> None:
        """Wait until no task is left."""
        with self.changed:
            self.changed.wait_for(lambda: not self._busy)

    def _run(self, task: Callable[[], None]) -> None:
        """Run one task in the caller's thread; tasks submitted in the meantime follow in a thread."""
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
        except RuntimeError:  # too many threads: run the tasks here, because a reader may wait for them
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
