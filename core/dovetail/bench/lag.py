"""Measure how late the load client itself is.

If its delays are not small compared with the measured latencies, then these latencies do not describe the server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import numpy as np

from dovetail.bench.records import ClientLag, Measurement

_PERIOD = 0.01
"""Seconds between two checks of the event loop: often enough to observe delays of events, seldom enough to cost
nothing."""


class LagMonitor:
    """Measure the delays of the event loop while the context is active."""

    async def __aenter__(self) -> LagMonitor:
        self._late: list[float] = []
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        self._wall = time.perf_counter() - self._wall
        self._cpu = time.process_time() - self._cpu

    async def _watch(self) -> None:
        while True:
            due = time.perf_counter() + _PERIOD
            await asyncio.sleep(_PERIOD)
            self._late.append(time.perf_counter() - due)

    def lag(self, measurements: Sequence[Measurement]) -> ClientLag:
        """Return the delays of the event loop while the context was active, and the delays of sending these calls."""
        loop = _percentiles(self._late)
        send = _percentiles([m.sent - m.due for m in measurements])
        return ClientLag(
            loop_p50=loop[0],
            loop_p99=loop[1],
            loop_max=loop[2],
            send_p50=send[0],
            send_p99=send[1],
            send_max=send[2],
            cpu_share=self._cpu / self._wall,
        )


def _percentiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    if not seconds:
        return 0.0, 0.0, 0.0
    p50, p99, most = (max(float(value), 0.0) for value in np.percentile(seconds, (50, 99, 100)))
    return p50, p99, most
