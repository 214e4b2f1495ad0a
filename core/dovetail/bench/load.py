"""Send calls when they are due, independently of the results of earlier calls.

In an open loop a call is due at its arrival time, and its latencies count from that time. A server that stalls delays
no arrival, and the calls that arrive during the stall show it. A client that waits for answers before it sends, or
counts latencies from the actual time of sending, would omit exactly these calls (Tene, How NOT to Measure Latency). In
a closed loop (``Workload.concurrency``) each user begins the next call when the previous one is done, so that a slow
server receives fewer calls.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from dovetail.bench.answers import CallProgress, Sender
from dovetail.bench.call_tracker import CallTracker, OnDone, ignore_measurement
from dovetail.bench.lag import LagMonitor
from dovetail.bench.prompts import CallPrompt, first_prompt, next_prompt
from dovetail.bench.records import ClientLag, LoadCall, Measurement, Workload

_LEAD = 0.05
"""Seconds before the first arrival, in which the tasks are created."""


async def run_load(
    workload: Workload, send: Sender, on_done: OnDone = ignore_measurement
) -> tuple[list[Measurement], ClientLag]:
    """Make every call. Return the measurements in the workload's order, and how late the client was.

    ``on_done`` is called with each measurement as its call ends.
    """
    load = _Load(workload, send, on_done)
    async with LagMonitor() as monitor:
        measured = await load.run()
    return measured, monitor.lag(measured)


class _Load:
    def __init__(self, workload: Workload, send: Sender, on_done: OnDone) -> None:
        self._users = workload.concurrency
        self._tracker = CallTracker(workload, on_done)
        self._send = send
        self._start = 0.0

    async def run(self) -> list[Measurement]:
        roots = self._tracker.roots
        self._start = time.perf_counter() + _LEAD
        async with asyncio.TaskGroup() as group:
            if self._users is None:
                for call in sorted(roots, key=lambda call: call.arrival):
                    await self._until(call.arrival)
                    group.create_task(self._run_call(call, first_prompt(call), call.arrival))
            else:
                turns = iter(roots)
                for _ in range(self._users):
                    group.create_task(self._user(turns))
        return self._tracker.measurements()

    def _clock(self) -> float:
        return time.perf_counter() - self._start

    async def _until(self, due: float) -> None:
        while (delay := due - self._clock()) > 0:  # timers may fire up to a millisecond early
            await asyncio.sleep(delay)

    async def _user(self, turns: Iterator[LoadCall]) -> None:
        """Run one user of a closed loop. The users share ``turns``."""
        await self._until(0.0)
        for call in turns:
            await self._run_call(call, first_prompt(call), self._clock())

    async def _run_call(self, call: LoadCall, prompt: CallPrompt, due: float) -> None:
        """Make one call and then all calls that follow from its answer."""
        answer = await self._send(call, prompt, self._clock)
        followers = self._tracker.record(call, answer, due)
        if followers:
            await asyncio.gather(*(self._follow(child, prompt, answer) for child in followers))

    async def _follow(self, call: LoadCall, before: CallPrompt, answer: CallProgress) -> None:
        due = answer.end + call.think
        await self._until(due)
        prompt = next_prompt(call, before, answer.text, answer.output_ids) if call.continues else first_prompt(call)
        await self._run_call(call, prompt, due)
