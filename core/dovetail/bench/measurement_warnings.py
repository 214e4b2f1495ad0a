"""Warn about conditions that make the numbers of a run unreliable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dovetail.bench.metrics import SampleSummary, Summary
from dovetail.bench.records import ClientLag

_MAX_CPU_SHARE = 0.8
_MAX_RELATIVE_DELAY = 0.1
_MIN_DELAY = 0.001


class MeasurementWarning(NamedTuple):
    """Describe one warning. ``kind`` is a short text that is the same for every run; ``text`` describes this run."""

    kind: str
    text: str


def warnings_of(summary: Summary, lag: ClientLag | None) -> list[MeasurementWarning]:
    """Return the warnings for a run: the client was too busy or too late, calls failed, or there were too few calls for
    a p99."""
    found = _of_client(summary, lag) if lag is not None else []
    if summary.failed:
        text = (
            f"{summary.failed} of {summary.calls} calls failed; latencies and rates describe the successful calls only"
        )
        found.append(MeasurementWarning("calls failed", text))
    if 0 < summary.completed < 100:
        text = f"{summary.completed} calls are too few for a 99th percentile, which is about the slowest one"
        found.append(MeasurementWarning("fewer than 100 calls: too few for a 99th percentile", text))
    return found


def warning_texts(runs: Sequence[tuple[float | None, Summary, ClientLag | None]]) -> list[str]:
    """Return the warnings of one run in full. For several runs (each with its rate), return each kind once with the
    rates at which it occurred."""
    found = [(rate, warnings_of(summary, lag)) for rate, summary, lag in runs]
    if len(found) == 1:
        return [warning.text for warning in found[0][1]]
    rates: dict[str, list[str]] = {}
    for rate, warnings in found:
        for warning in warnings:
            rates.setdefault(warning.kind, []).append("-" if rate is None else f"{rate:.3g}")
    return [f"{kind} (at {', '.join(places)} calls/s)" for kind, places in rates.items()]


def _of_client(summary: Summary, lag: ClientLag) -> list[MeasurementWarning]:
    found: list[MeasurementWarning] = []
    if lag.cpu_share > _MAX_CPU_SHARE:
        text = (
            f"the client used {lag.cpu_share:.0%} of a CPU: the numbers may describe the client instead of the "
            "server; send fewer calls, or start several clients"
        )
        found.append(MeasurementWarning("the client was busy", text))
    if _matters(lag.loop_p50, lag.loop_p99, summary.itl):
        text = (
            f"the client's event loop woke up late by {_ms(lag.loop_p50)} (p99 {_ms(lag.loop_p99)}), which is not small "
            "compared with the gaps between tokens; leave a CPU to the client"
        )
        found.append(MeasurementWarning("the client's event loop was late", text))
    if _matters(lag.send_p50, lag.send_p99, summary.ttft):
        text = (
            f"calls were sent {_ms(lag.send_p50)} (p99 {_ms(lag.send_p99)}) after they were due, which counts as their "
            "latency; leave a CPU to the client"
        )
        found.append(MeasurementWarning("the client sent calls late", text))
    return found


def _matters(p50: float, p99: float, measured: SampleSummary | None) -> bool:
    """Return whether a delay is more than a tenth of what was measured, at the median or at the tail."""
    if measured is None:
        return False
    return p50 > max(_MAX_RELATIVE_DELAY * measured.p50, _MIN_DELAY) or p99 > max(
        _MAX_RELATIVE_DELAY * measured.p99, _MIN_DELAY
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
