"""Define the report of ``dovetail bench``: every run with its numbers, as JSON and as a page."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from dovetail.bench.measurement_warnings import warning_texts
from dovetail.bench.metrics import SLO, Summary
from dovetail.bench.records import SCHEMA_VERSION, Data, RunRecord


class Point(Data):
    """Hold one run and its numbers.

    ``rate`` is the offered load in calls per second, or None if there was no such rate. ``meets`` is True if the
    required share of its calls met the SLO, and None without an SLO.
    """

    rate: float | None = None
    meets: bool | None = None
    summary: Summary
    record: RunRecord


class BenchReport(Data):
    """Hold the runs of one workload.

    ``best_rate`` is the highest rate at which ``share`` of the calls met ``slo``, if ``searched`` is true and there is
    one.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    title: str
    workload: dict[str, Any] = Field(description="The specification of the workload.")
    slo: SLO | None = None
    share: float = 0.9
    searched: bool = False
    best_rate: float | None = None
    startup_seconds: float | None = None
    points: tuple[Point, ...]

    def without_measurements(self) -> dict[str, Any]:
        """Return the report as JSON with the numbers of each run, without its individual calls."""
        return self.model_dump(mode="json", exclude={"points": {"__all__": {"record": {"measurements"}}}})

    @property
    def failed(self) -> bool:
        """Return whether no call succeeded, or a rate that meets the SLO was searched for and not found."""
        return not any(point.summary.completed for point in self.points) or (self.searched and self.best_rate is None)

    def of_own_server(self, startup_seconds: float, peak_memory: int | None) -> BenchReport:
        """Return the report with the start-up time and the peak memory of the server that was started for it."""
        more = {"startup_seconds": startup_seconds, "peak_memory_bytes": peak_memory}
        points = [p.model_copy(update={"record": p.record.model_copy(update=more)}) for p in self.points]
        return self.model_copy(update={"startup_seconds": startup_seconds, "points": tuple(points)})

    @property
    def notes(self) -> list[str]:
        """Return warnings about the numbers."""
        return warning_texts([(point.rate, point.summary, point.record.lag) for point in self.by_rate])

    @property
    def by_rate(self) -> list[Point]:
        """Return the points in ascending order of their rates."""
        return sorted(self.points, key=lambda point: point.rate or 0.0)
