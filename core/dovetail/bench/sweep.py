"""Measure several rates, or search for the highest rate that meets an SLO."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence

from dovetail.bench.metrics import SLO, summarize
from dovetail.bench.records import RunRecord
from dovetail.bench.report import Point
from dovetail.bench.specs import ArrivalSpec, Gamma, Poisson
from dovetail.errors import ConfigError

Measure = Callable[[float], Awaitable[RunRecord]]
"""Runs the load at a rate in calls per second."""

_MAX_PROBES = 24
_LOWEST_FACTOR = 2.0**-8


def at_rate(arrivals: ArrivalSpec | None, rate: float) -> Poisson | Gamma:
    """Return the arrival process at another rate; the default is Poisson. Raises ``ConfigError`` for one that has no
    rate."""
    if arrivals is None:
        return Poisson(rate=rate)
    if not isinstance(arrivals, Poisson | Gamma):
        raise ConfigError(f"arrivals of kind {arrivals.kind!r} have no rate that can be changed; use poisson or gamma")
    return arrivals.model_copy(update={"rate": rate})


async def sweep(measure: Measure, rates: Sequence[float], slo: SLO | None, share: float) -> list[Point]:
    """Run the load at each rate."""
    return [point_of(rate, await measure(rate), slo, share) for rate in rates]


async def highest_rate(
    measure: Measure, slo: SLO, share: float, start: float = 1.0, tolerance: float = 0.1
) -> tuple[float | None, list[Point]]:
    """Return the highest rate at which ``share`` of the calls meet ``slo``, and every measured point in the order of
    measurement.

    The rate is doubled (or halved) from ``start`` until it lies between two measured rates. Then the interval is
    bisected on a logarithmic scale, up to the factor ``1 + tolerance``. The rate is None if no rate is low enough.
    """
    points: list[Point] = []

    async def meets(rate: float) -> bool:
        points.append(point_of(rate, await measure(rate), slo, share))
        return points[-1].meets is True

    low, high = await _bracket(meets, points, start)
    while low is not None and high is not None and high > low * (1 + tolerance) and len(points) < _MAX_PROBES:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if await meets(middle) else (low, middle)
    return low, points


async def _bracket(
    meets: Callable[[float], Awaitable[bool]], points: Sequence[Point], start: float
) -> tuple[float | None, float | None]:
    """Return a rate that meets the SLO and a rate that does not. Either is None if the search finds no such
    rate."""
    if await meets(start):
        low = start
        for _ in range(_MAX_PROBES // 2):
            if not await meets(low * 2):
                return low, low * 2
            low *= 2
        return low, None
    high = start
    # a run with a single call has no load that could be reduced
    while high > start * _LOWEST_FACTOR and len(points[-1].record.measurements) > 1:
        if await meets(high / 2):
            return high / 2, high
        high /= 2
    return None, high


def point_of(rate: float | None, record: RunRecord, slo: SLO | None, share: float) -> Point:
    """Return a run with its numbers; ``share`` of the calls must meet ``slo``."""
    summary = summarize(record, slo)
    meets = summary.goodput.share >= share if summary.goodput is not None else None
    return Point(rate=rate, meets=meets, summary=summary, record=record)
