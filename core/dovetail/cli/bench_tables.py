"""Show the runs of ``dovetail bench``: progress while they run, and tables at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dovetail.cli.tables import add, console, facts, table

if TYPE_CHECKING:
    from dovetail.bench.call_tracker import OnDone
    from dovetail.bench.metrics import SampleSummary
    from dovetail.bench.records import ClientLag, Measurement, Workload
    from dovetail.bench.report import BenchReport, Point
    from dovetail.bench.session import OnRun


@contextlib.contextmanager
def watching() -> Iterator[OnRun]:
    """Show a progress bar for each run on standard error if that is a terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:

        def on_run(workload: Workload, rate: float | None) -> OnDone:
            at = f" at {rate:g}/s" if rate is not None else ""
            bar = progress.add_task(f"{workload.name}{at}", total=len(workload.calls))

            def on_done(measurement: Measurement) -> None:
                progress.advance(bar)

            return on_done

        yield on_run


def print_report(report: BenchReport) -> None:
    """Print tables on standard output: one run in detail, or a row for each run."""
    out = console()
    if len(report.points) == 1:
        _print_run(report, report.points[0], out)
    else:
        _print_runs(report, out)
    for text, count in _failures(report).items():
        out.print(f"failed {count} times: {text}", style="red", markup=False)
    for text in report.notes:
        out.print(f"note: {text}", style="yellow", markup=False)
    if report.searched and report.slo is not None:
        required = f"{report.share:.0%} of the calls within {report.slo}"
        best = report.best_rate
        found = f"up to {best:.3g} calls/s" if best is not None else "at none of the measured rates"
        out.print(f"{required}: {found}", style="bold", markup=False)


def _print_run(report: BenchReport, point: Point, out: Console) -> None:
    summary, record = point.summary, point.record
    rows = {
        "workload": f"{record.workload} ({record.workload_hash}), {summary.calls} calls{_offered(point)}",
        "completed": f"{summary.completed} in {summary.seconds:.2f} s, {summary.calls_per_second:.2f} calls/s",
        "output": f"{summary.output_tokens} tokens, {summary.output_tokens_per_second:.1f} tokens/s",
        "prompts": f"{summary.prompt_tokens} tokens, {_share(summary.cached_share)} found in the prefix cache",
        "total": f"{summary.total_tokens_per_second:.1f} tokens/s",
    }
    if summary.acceptance_length is not None:
        rows["acceptance length"] = f"{summary.acceptance_length:.2f}"
    if summary.goodput is not None:
        good = summary.goodput
        rows["goodput"] = f"{good.rate:.2f} calls/s, {good.share:.1%} of the calls within {good.slo}"
    if report.startup_seconds is not None:
        rows["start-up"] = f"{report.startup_seconds:.1f} s"
    if record.peak_memory_bytes is not None:
        rows["peak memory"] = f"{record.peak_memory_bytes / 2**30:.2f} GiB"
    if record.lag is not None:
        rows["client"] = _client(record.lag)
    out.print(facts(report.title, rows))
    out.print()
    grid = table("milliseconds", "mean", "p50", "p90", "p99", "max")
    for name in ("ttft", "tpot", "itl", "e2e"):
        add(grid, name.upper(), *_five(getattr(summary, name)))
    out.print(grid)


def _five(values: SampleSummary | None) -> list[str]:
    keys = ("mean", "p50", "p90", "p99", "max")
    return ["-" if values is None else _ms(getattr(values, key)) for key in keys]


def _print_runs(report: BenchReport, out: Console) -> None:
    out.print(report.title, style="bold", markup=False)
    titles = ["rate", "done/s", "tok/s", "TTFT p50", "p99", "TPOT p50", "p99", "failed", "CPU"]
    grid = table(*titles, *(["SLO met"] if report.slo is not None else []))
    grid.padding = (0, 1, 0, 0)
    for point in report.by_rate:
        summary = point.summary
        cells = [
            f"{point.rate:.3g}" if point.rate is not None else "-",
            f"{summary.calls_per_second:.2f}",
            f"{summary.output_tokens_per_second:.0f}",
            *_two(summary.ttft),
            *_two(summary.tpot),
            str(summary.failed),
            f"{point.record.lag.cpu_share:.0%}" if point.record.lag is not None else "-",
        ]
        if summary.goodput is not None:
            cells.append(f"{summary.goodput.share:.1%} {'yes' if point.meets else 'no'}")
        add(grid, *cells)
    out.print(grid)


def _two(values: SampleSummary | None) -> list[str]:
    return ["-", "-"] if values is None else [_ms(values.p50), _ms(values.p99)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def _offered(point: Point) -> str:
    return f", {point.rate:g} per second" if point.rate is not None else ""


def _share(share: float | None) -> str:
    return "an unknown share" if share is None else f"{share:.1%}"


def _client(lag: ClientLag) -> str:
    return (
        f"{lag.cpu_share:.0%} of a CPU; event loop late by {_ms(lag.loop_p50)} ms (p99 {_ms(lag.loop_p99)}), "
        f"calls sent {_ms(lag.send_p50)} ms late (p99 {_ms(lag.send_p99)})"
    )


def _failures(report: BenchReport) -> dict[str, int]:
    counts: dict[str, int] = {}
    for point in report.points:
        for text, count in point.summary.failures.items():
            counts[text] = counts.get(text, 0) + count
    return counts
