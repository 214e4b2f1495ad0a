"""Convert timed runs to ratios, tables, JSON and Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

BEGIN, END = "<!-- {name}: begin, written by the benchmark -->", "<!-- {name}: end -->"


class Spread(NamedTuple):
    """Hold the median, minimum and maximum over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(slots=True)
class Row:
    """Hold the rounds of one workload. ``seconds[arm][round]``; ``failed[arm]`` is the reason why an arm has no rounds.

    ``same_tokens[arm]`` is the share of output tokens that agree with those of the first arm, up to each request's
    first difference: a check that the arms do the same work. In bfloat16, and at near ties, it is below 1.
    """

    model: str
    dtype: str
    workload: str
    title: str
    useful_tokens: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    same_tokens: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    others_cpu: float = 0.0

    def rate(self, arm: str) -> Spread:
        """Return the required output tokens per second."""
        return Spread.of([self.useful_tokens / s for s in self.seconds[arm]])

    def ratio(self, arm: str, baseline: str) -> Spread:
        """Return how many times faster ``arm`` is than ``baseline``, paired by round."""
        pairs = zip(self.seconds[baseline], self.seconds[arm], strict=True)
        return Spread.of([base / mine for base, mine in pairs])

    def to_json(self, arm: str) -> dict[str, Any]:
        """Return all measurements, with the ratios of ``arm`` over the others."""
        done = [name for name, rounds in self.seconds.items() if rounds]
        return {
            **asdict(self),
            "tokens_per_second": {name: self.rate(name)._asdict() for name in done},
            "ratios": {f"{arm} / {b}": self.ratio(arm, b)._asdict() for b in done if b != arm and arm in done},
        }


def agreements_with_first(tokens: Mapping[str, list[list[int]] | None]) -> dict[str, float]:
    """Compute ``Row.same_tokens``: each arm's tokens against those of the first arm that has any."""
    given = {arm: rows for arm, rows in tokens.items() if rows is not None}
    reference = next(iter(given.values()), [])
    return {arm: agreement(rows, reference) for arm, rows in given.items()}


def agreement(mine: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Return the share of tokens before each pair's first difference."""
    same = sum(common_prefix(a, b) for a, b in zip(mine, theirs, strict=True))
    return same / sum(map(len, theirs))


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def header(arms: Sequence[str], subject: str) -> list[str]:
    """Return the columns of both tables."""
    return ["model", "dtype", "workload", *arms, *(f"{subject} / {a}" for a in arms if a != subject)]


def cells(row: Row, arms: Sequence[str], subject: str, *, ranges: bool) -> list[str]:
    """Return the tokens per second of each arm, then the ratios: medians, with ``ranges`` as ``median
    (least-greatest)``."""
    return [
        *(rate_cell(row, arm, ranges=ranges) for arm in arms),
        *(ratio_cell(row, subject, arm, ranges=ranges) for arm in arms if arm != subject),
    ]


def rate_cell(row: Row, arm: str, *, ranges: bool) -> str:
    """Return the output tokens per second; for a single token, the milliseconds to it."""
    if not row.seconds.get(arm):
        return "-"
    if row.useful_tokens > 1:
        return cell(row.rate(arm), 0, "", ranges=ranges)
    return cell(Spread.of([1e3 * s for s in row.seconds[arm]]), 1, " ms", ranges=ranges)


def ratio_cell(row: Row, arm: str, baseline: str, *, ranges: bool) -> str:
    """Return how many times faster the arm is."""
    if not row.seconds.get(arm) or not row.seconds.get(baseline):
        return "-"
    return cell(row.ratio(arm, baseline), 2, "", ranges=ranges)


def cell(spread: Spread, digits: int, unit: str, *, ranges: bool) -> str:
    """Return a cell such as ``123 ms (120-125)``."""
    median, low, high = (f"{x:.{digits}f}" for x in spread)
    return f"{median}{unit} ({low}-{high})" if ranges else f"{median}{unit}"


def console_table(rows: Sequence[Row], arms: Sequence[str], subject: str) -> Table:
    """Return the table of medians for a terminal."""
    table = Table(title="output tokens a second, then how many times faster (medians)", pad_edge=False)
    for name in header(arms, subject):
        table.add_column(name, justify="left" if name in ("model", "dtype", "workload") else "right")
    for row in rows:
        table.add_row(row.model, row.dtype, row.workload, *cells(row, arms, subject, ranges=False))
    return table


def markdown(rows: Sequence[Row], arms: Sequence[str], subject: str, facts: Mapping[str, str]) -> str:
    """Return the section of docs/benchmarks.md: the facts of the run, the table with ranges, agreements and
    failures."""
    names = header(arms, subject)
    lines = [f"- {key}: {value}" for key, value in facts.items()]
    lines += [f"- {text}" for text in agreements(rows)]
    lines += ["", line(names), line(["---"] * len(names))]
    lines += [line([row.model, row.dtype, row.title, *cells(row, arms, subject, ranges=True)]) for row in rows]
    failures = {(arm, row.model, row.dtype): why for row in rows for arm, why in row.failed.items()}
    lines += [
        f"\n{arm} did not run {model} in {dtype}: `{short(why)}`" for (arm, model, dtype), why in failures.items()
    ]
    return "\n".join(lines) + "\n"


def agreements(rows: Sequence[Row]) -> list[str]:
    """Return, for each dtype, how far the arms' tokens agree with those of the first arm."""
    shares: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        for arm, share in row.same_tokens.items():
            shares.setdefault(row.dtype, {}).setdefault(arm, []).append(share)
    found: list[str] = []
    for dtype, by_arm in shares.items():
        first, *others = by_arm
        parts = ", ".join(f"{arm} {statistics.mean(by_arm[arm]):.0%}" for arm in others)
        if parts:
            found.append(f"tokens as of {first}, up to each request's first difference, {dtype}: {parts}")
    return found


def line(columns: Sequence[str]) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(columns)} |"


def short(text: str) -> str:
    """Return the last line of an error."""
    return text.strip().splitlines()[-1].replace("`", "'")


def replace_section(path: Path, name: str, text: str) -> None:
    """Put ``text`` between the marks of section ``name`` in a Markdown file. Raises ``ValueError`` if the marks are
    missing."""
    begin, end = BEGIN.format(name=name), END.format(name=name)
    page = path.read_text()
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"{path} must hold the lines {begin!r} and {end!r} once each")
    head, _, rest = page.partition(begin)
    path.write_text(f"{head}{begin}\n\n{text.strip()}\n\n{end}{rest.partition(end)[2]}")
