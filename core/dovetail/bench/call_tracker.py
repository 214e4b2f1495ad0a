"""Track which calls of a run are done and which calls can be made next."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dovetail.bench.answers import CallProgress
from dovetail.bench.records import LoadCall, Measurement, Workload

OnDone = Callable[[Measurement], None]


def ignore_measurement(measurement: Measurement) -> None:
    """Ignore a measurement."""


class CallTracker:
    """Collect the measurements of a run. ``on_done`` is called with each measurement as it is recorded."""

    def __init__(self, workload: Workload, on_done: OnDone = ignore_measurement) -> None:
        self.roots = [call for call in workload.calls if call.parent is None]
        self._calls = workload.calls
        self._on_done = on_done
        self._done: dict[str, Measurement] = {}
        self._followers: dict[str, list[LoadCall]] = {}
        for call in workload.calls:
            if call.parent is not None:
                self._followers.setdefault(call.parent, []).append(call)

    def record(self, call: LoadCall, answer: CallProgress, due: float) -> Sequence[LoadCall]:
        """Record that a call has ended and return the calls that can be made now.

        After a failed call, all calls that would have followed are recorded as failed.
        """
        self._add(call, answer, due)
        followers = self._followers.get(call.id, ())
        if answer.error is None:
            return followers
        for child in followers:
            self._skip(child, answer.end, f"not sent: call {call.id!r} before it failed")
        return ()

    def _skip(self, call: LoadCall, now: float, why: str) -> None:
        self._add(call, CallProgress(sent=now, end=now, error=why), now)
        for child in self._followers.get(call.id, ()):
            self._skip(child, now, why)

    def _add(self, call: LoadCall, answer: CallProgress, due: float) -> None:
        measurement = answer.measurement(call, due)
        self._done[call.id] = measurement
        self._on_done(measurement)

    def measurements(self) -> list[Measurement]:
        """Return all measurements in the workload's order. Every call must have been recorded."""
        return [self._done[call.id] for call in self._calls]
