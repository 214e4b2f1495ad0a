"""Reasons not to trust a run's numbers."""

from __future__ import annotations

from dovetail.bench.metrics import Summary
from dovetail.bench.records import ClientLag

_BUSY = 0.8
_LATE = 0.1


def doubts(summary: Summary, lag: ClientLag | None) -> list[str]:
    """What makes the numbers doubtful: a client that was too busy or too late, calls that failed, too few calls for a p99."""
    found = _of_client(summary, lag) if lag is not None else []
    if summary.failed:
        found.append(f"{summary.failed} of {summary.calls} calls failed; latencies and rates are those of the others")
    if 0 < summary.completed < 100:
        found.append(f"{summary.completed} calls are too few for a 99th percentile: it is about the slowest one")
    return found


def _of_client(summary: Summary, lag: ClientLag) -> list[str]:
    found: list[str] = []
    if lag.cpu_share > _BUSY:
        found.append(
            f"the client used {lag.cpu_share:.0%} of a CPU: it may have been measured, and not the server; ask less of it, or "
            "start several clients"
        )
    gap = summary.itl.p50 if summary.itl is not None else None
    if gap is not None and lag.loop_p99 > max(_LATE * gap, 0.001):
        found.append(
            f"the client's event loop woke up to {lag.loop_p99 * 1e3:.1f} ms late (99 % of the time less), against a median "
            f"gap of {gap * 1e3:.1f} ms between tokens: latencies hold no better than that; free CPUs for the client"
        )
    first = summary.ttft.p50 if summary.ttft is not None else None
    if first is not None and lag.send_p99 > max(_LATE * first, 0.001):
        found.append(
            f"calls were sent up to {lag.send_p99 * 1e3:.1f} ms after they were due (99 % of them less), which counts as their "
            "latency"
        )
    return found
