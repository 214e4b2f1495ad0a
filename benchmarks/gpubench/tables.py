"""Make the tables that are printed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from gpubench.models import TITLES
from gpubench.plan import Measure
from gpubench.record import Record
from gpubench.targets import DIGITS, gain, reached, target

NAME_LENGTH = 90


def results(record: Record) -> Table:
    """Return every number with its floor, must and goal. Green: the goal is met; yellow: must is met; red: neither
    is met."""
    names = ("model", "row", "case", "floor", "now", "", "must", "goal", "now / must", "of the way to the goal")
    table = _table("measured, compared with the peers' numbers (must), the goal and the hardware's floor", names, 3)
    for model, measures in record.measures.items():
        for m in measures:
            table.add_row(TITLES[model], m.row, m.case, *_cells(model, m))
    return table


def _cells(model: str, m: Measure) -> list[str]:
    wanted, digits = target(model, m.row, m.case), DIGITS[m.unit]

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:,.{digits}f}"

    colour = {True: "green", False: "red", None: "bold"}[reached(m.value, wanted.must, m.unit)]
    if reached(m.value, wanted.goal, m.unit):
        colour = "bold green"
    elif colour == "green":
        colour = "yellow"
    over = "-" if wanted.must is None else f"{gain(m.value, wanted.must, m.unit):.2f}x"
    now = f"[{colour}]{number(m.value)}[/]"
    return [number(wanted.floor), now, m.unit, number(wanted.must), number(wanted.goal), over, _way(m.value, wanted)]


def _way(value: float, wanted: Any) -> str:
    if wanted.must is None or wanted.goal is None or wanted.must == wanted.goal:
        return "-"
    return f"{(value - wanted.must) / (wanted.goal - wanted.must):.0%}"


def correctness(record: Record) -> Table:
    """Return the checks. ``extend`` and ``decode``: greatest and mean difference of log-probabilities."""
    names = ("attention", "page size", "extend", "decode", "verdict")
    table = _table("log-probabilities in bfloat16 against torch_native in float32, and greedy tokens", names, 1)
    for task, found in record.checks.items():
        backend, _, case = task.rpartition(":")
        parts = ["", ""]
        if "same" in found:
            case, parts = "float32 tokens", ["", f"{found['same']} of {found['of']} the same"]
        elif "extend_max" in found:
            parts = [f"{found[f'{p}_max']:.4f} ({found[f'{p}_mean']:.5f})" for p in ("extend", "decode")]
        table.add_row(backend, case, *parts, _verdict(record, task))
    return table


def _verdict(record: Record, task: str) -> str:
    verdict = record.verdict(task)
    if verdict is None:
        reason = record.checks[task]["unusable"].strip().splitlines()[-1].strip(" -")
        return f"[dim]not usable: {escape(reason[:NAME_LENGTH])}[/]"
    return "[green]right[/]" if verdict else "[red]WRONG[/]"


def breakdowns(found: Sequence[dict[str, Any]], title: str) -> Table:
    """Return the milliseconds of one decode step, with a column for each batch size."""
    names = ("ms of a decode step", *(f"bs {part['batch']}" for part in found))
    table = _table(f"{title}: how the time of a decode step is spent", names, 1)
    rows: list[tuple[str, str]] = [("step_ms", "")]
    rows += [("host_ms", key) for key in _keys(found, "host_ms")]
    if "gpu_busy_ms" in found[0]:
        rows += [("gpu_busy_ms", ""), *(("families_ms", key) for key in _keys(found, "families_ms"))]
        rows += [("gpu_idle_ms", ""), *(("gaps_ms", key) for key in _keys(found, "gaps_ms"))]
        rows += [("kernels", ""), *(("cuda_calls_ms", key) for key in _keys(found, "cuda_calls_ms"))]
    for name, key in rows:
        values = [part[name].get(key, 0.0) if key else part[name] for part in found]
        label = f"  {LABELS[name]}{key}" if key else f"[bold]{LABELS[name]}[/]"
        table.add_row(label, *(f"{v:.0f}" if name == "kernels" else f"{v:.3f}" for v in values))
    return table


LABELS = {
    "step_ms": "wall time, not profiled",
    "host_ms": "host: ",
    "gpu_busy_ms": "GPU busy",
    "families_ms": "",
    "gpu_idle_ms": "GPU idle (wall less busy)",
    "gaps_ms": "gaps ",
    "kernels": "kernels and copies, count",
    "cuda_calls_ms": "host in ",
}


def _keys(found: Iterable[dict[str, Any]], name: str) -> list[str]:
    return list(dict.fromkeys(key for part in found for key in part.get(name, {})))


def top_kernels(part: dict[str, Any]) -> Table:
    """Return the kernels that take most of a step."""
    table = _table(f"bs {part['batch']}: kernels by time in a step", ("kernel", "family", "calls", "ms", "us each"), 2)
    for kernel in part["top"]:
        each = kernel["ms"] / kernel["calls"] * 1e3
        name, calls = escape(kernel["name"][:NAME_LENGTH]), f"{kernel['calls']:.1f}"
        table.add_row(name, kernel["family"], calls, f"{kernel['ms']:.3f}", f"{each:.1f}")
    return table


def _table(title: str, names: Sequence[str], left: int) -> Table:
    table = Table(title=title, title_justify="left", pad_edge=False)
    for i, name in enumerate(names):
        table.add_column(name, justify="left" if i < left else "right", overflow="fold")
    return table
