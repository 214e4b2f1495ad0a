"""What ``dovetail bench`` leaves: every run with its numbers, as JSON and as a page."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from dovetail.bench.measurement_warnings import warning_texts
from dovetail.bench.metrics import SLO, Summary
from dovetail.bench.records import SCHEMA_VERSION, Data, RunRecord


class Point(Data):
    """One run. ``rate`` is the offered load in calls a second, where there was one; ``meets``: the share of its calls that the
    SLO asks for has met it."""

    rate: float | None = None
    meets: bool | None = None
    summary: Summary
    record: RunRecord


class BenchReport(Data):
    """Runs of one workload. ``best_rate`` is the highest that met ``slo`` for ``share`` of the calls, where that was looked
    for."""

    schema_version: Literal[1] = SCHEMA_VERSION
    title: str
    workload: dict[str, Any] = Field(description="As it was specified.")
    slo: SLO | None = None
    share: float = 0.9
    searched: bool = False
    best_rate: float | None = None
    startup_seconds: float | None = None
    points: tuple[Point, ...]

    def without_measurements(self) -> dict[str, Any]:
        """As JSON, with the numbers of each run but not every call of it."""
        return self.model_dump(mode="json", exclude={"points": {"__all__": {"record": {"measurements"}}}})

    @property
    def failed(self) -> bool:
        """True if no call succeeded, or if no rate met the SLO where one was looked for."""
        return not any(point.summary.completed for point in self.points) or (self.searched and self.best_rate is None)

    def of_own_server(self, startup_seconds: float, peak_memory: int | None) -> BenchReport:
        """With what is known of a server that was started for it."""
        more = {"startup_seconds": startup_seconds, "peak_memory_bytes": peak_memory}
        points = [p.model_copy(update={"record": p.record.model_copy(update=more)}) for p in self.points]
        return self.model_copy(update={"startup_seconds": startup_seconds, "points": tuple(points)})

    @property
    def notes(self) -> list[str]:
        """Reasons to doubt the numbers."""
        return warning_texts([(point.rate, point.summary, point.record.lag) for point in self.by_rate])

    @property
    def by_rate(self) -> list[Point]:
        """The points, lower rates first."""
        return sorted(self.points, key=lambda point: point.rate or 0.0)
