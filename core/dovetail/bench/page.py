"""Write a report as one HTML page without external resources."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dovetail.atomic_files import write_atomically
from dovetail.bench.html import render
from dovetail.bench.metrics import SampleSummary, values
from dovetail.bench.records import RunRecord
from dovetail.bench.report import BenchReport, Point
from dovetail.bench.svg import Series, chart

_TEMPLATE = Path(__file__).parent / "templates" / "bench.html"
_STEPS = 200
"""The number of points of a distribution's curve."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Hold a chart, the names of its series, and its caption."""

    title: str
    svg: str
    labels: tuple[str, ...]
    caption: str


def write_page(report: BenchReport, file: Path) -> None:
    """Write the page to ``file``."""
    write_atomically(file, page(report))


def page(report: BenchReport) -> str:
    """Return the page as text."""
    rates = len(report.points) > 1
    return render(
        _TEMPLATE,
        {"ms": _ms, "json": lambda data: json.dumps(data, indent=1)},
        report=report,
        headline=_headline(report),
        figures=_by_rate(report) if rates else _of_run(report.points[0].record),
        record=report.points[-1].record,
    )


def _headline(report: BenchReport) -> str:
    if report.searched and report.slo is not None:
        within = f"{report.share:.0%} of the calls within {report.slo}"
        best = report.best_rate
        return f"{best:.3g} calls/s with {within}" if best is not None else f"No rate had {within}"
    tokens = max(point.summary.output_tokens_per_second for point in report.points)
    return f"{tokens:.0f} output tokens/s" + (" at most" if len(report.points) > 1 else "")


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3g}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def _by_rate(report: BenchReport) -> list[Figure]:
    points = [p for p in report.by_rate if p.rate is not None]
    slo = report.slo
    figures = [
        _latencies(points, "ttft", "Time to first token", slo.ttft_ms if slo is not None else None),
        _latencies(points, "tpot", "Time per output token", slo.tpot_ms if slo is not None else None),
    ]
    done = [(p.rate or 0.0, p.summary.output_tokens_per_second) for p in points]
    figures.append(
        _figure("Throughput", [Series("output tokens/s", done)], "offered calls/s", "tokens/s", "", None, False)
    )
    good = [(p.rate or 0.0, p.summary.goodput.share * 100) for p in points if p.summary.goodput is not None]
    if good:
        caption = f"Calls within {slo}; the line marks the required share."
        line = [Series("% of the calls within the SLO", good)]
        figures.append(_figure("Goodput", line, "offered calls/s", "%", caption, report.share * 100, False))
    return [figure for figure in figures if figure is not None]


def _latencies(points: Sequence[Point], metric: str, title: str, bound: float | None) -> Figure | None:
    found: list[tuple[float, SampleSummary]] = [
        (p.rate or 0.0, d) for p in points if (d := getattr(p.summary, metric)) is not None and d.p50 > 0
    ]
    series = [Series(name, [(rate, getattr(d, name) * 1e3) for rate, d in found]) for name in ("p50", "p99")]
    caption = "The horizontal line marks the bound of the SLO." if bound else ""
    return _figure(title, series, "offered calls/s", "ms", caption, bound, True)


def _of_run(record: RunRecord) -> list[Figure]:
    done = [m for m in record.measurements if m.ok]
    firsts = [(m.due, (m.first_token - m.due) * 1e3) for m in done if m.first_token is not None]
    names = (("ttft", "Time to first token"), ("tpot", "Time per output token"), ("itl", "Between tokens"))
    figures = [_curve([value for _, value in values(done, metric)], title) for metric, title in names]
    dots = [Series("one call", firsts, line=False)]
    caption = "Over the time at which each call was due: an upward slope is a growing queue."
    figures.append(_figure("Time to first token over the run", dots, "s", "ms", caption, None, False))
    return [figure for figure in figures if figure is not None]


def _curve(seconds: Sequence[float], title: str) -> Figure | None:
    shown = [value for value in seconds if value > 0]
    if not shown:
        return None
    shares = np.linspace(0, 100, _STEPS + 1)
    places = [
        (float(value) * 1e3, float(share)) for share, value in zip(shares, np.percentile(shown, shares), strict=True)
    ]
    svg = chart([Series(title, places, dots=False)], "ms", "% at most", log_x=True)
    return Figure(title, svg, (), "The share of values up to each duration.")


def _figure(
    title: str, series: list[Series], x: str, y: str, caption: str, bound: float | None, log_y: bool
) -> Figure | None:
    if not any(one.points for one in series):
        return None
    svg = chart(series, x, y, log_y=log_y, bound=bound)
    return Figure(title, svg, tuple(one.label for one in series) if len(series) > 1 else (), caption)
