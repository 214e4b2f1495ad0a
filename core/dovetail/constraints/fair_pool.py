"""Run compilations on threads, in turns for tenants."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import ParamSpec

from dovetail.fair_queue import FairSlots

P = ParamSpec("P")


class FairPool:
    """Run calls on ``threads`` threads, and on one more for a tenant that has none running. Calls that wait take turns by
    tenant, by the time that the calls of each have taken. Thread-safe."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads + 1, name)
        self._slots: FairSlots[Callable[[], float]] = FairSlots(threads)
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, tenant: str, weight: float, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Run ``call`` when it is the turn of ``tenant``. It must not raise. Raises ``RuntimeError`` if no thread can be
        started; ``call`` may then run later."""

        def timed() -> float:
            start = time.monotonic()
            call(*args, **kwargs)
            return (time.monotonic() - start) / weight

        with self._lock:
            self._slots.put(tenant, timed)
            self._start()

    def close(self) -> None:
        """Start no more calls. Those that run end by themselves."""
        with self._lock:
            self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        while not self._closed and (found := self._slots.start_next()) is not None:
            self._pool.submit(partial(self._run, *found))

    def _run(self, tenant: str, timed: Callable[[], float]) -> None:
        cost = 0.0
        try:
            cost = timed()
        finally:
            with self._lock, suppress(RuntimeError):  # no thread can be started: this one takes what is submitted
                self._slots.ended(tenant, cost)
                self._start()
