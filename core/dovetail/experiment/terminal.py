"""Show a finished experiment in the terminal: the verdict in words, and tables."""

from __future__ import annotations

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dovetail.experiment import words
from dovetail.experiment.result import Comparison, ExperimentRecord

STYLE = {"faster": "green", "slower": "red", "equivalent": "cyan", "inconclusive": "yellow", "differs": "red"}

NARROW = 130
"""The width in characters below which tables have fewer columns."""
_NOTE = {"info": "dim", "warning": "yellow", "loud": "bold red"}


def render(e: ExperimentRecord) -> Group:
    """Return the verdict and the tables of an experiment, for ``Console.print``."""
    parts: list[RenderableType] = [Text(words.headline(e), f"bold {STYLE[words.tone(e)]}")]
    parts += [Text(f"  {words.sentence(c, e.plan.delta)}") for c in e.primary]
    parts += [Text(f"  {note.text}", _NOTE[note.level]) for note in e.notes]
    parts += [_titled(words.gate_title(e.gate), _gate(e))]
    if e.comparisons:
        parts += [_titled("B against A", _Comparisons(e)), Text(f"  * primary. {words.confidence(e)}.", "dim")]
    if e.side_by_side:
        parts += [_titled("Also measured", _side_by_side(e))]
    return Group(*parts)


def _titled(title: str, table: RenderableType) -> Padding:
    return Padding(Group(Text(title, "bold"), table), (1, 0, 0, 0))


def _table(*columns: str) -> Table:
    """Return an empty table. Columns of numbers are right-aligned, all others left-aligned."""
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        grid.add_column(column, justify="right" if column in _NUMBERS else "left", no_wrap=column in _NUMBERS)
    return grid


_NUMBERS = ("A", "B", "change", "interval", "p", "noise floor")


def _gate(e: ExperimentRecord) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_row("", Text(e.gate.reason, "dim"))
    for name, text in words.gate_facts(e.gate):
        grid.add_row("", Text.assemble((f"{name}: ", "dim"), text))
    return grid


class _Comparisons:
    """Render a row for each metric. In a narrow terminal p-values and noise floors are left out, and notes follow below the table."""

    def __init__(self, e: ExperimentRecord) -> None:
        self._e = e

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width >= NARROW:
            yield _wide(self._e)
            return
        yield _narrow(self._e)
        for c in self._e.comparisons:
            if c.note:
                yield Padding(Text(f"{c.label}: {c.note}", "dim"), (0, 0, 0, 2))


def _narrow(e: ExperimentRecord) -> Table:
    grid = _table("metric", "A", "B", "change", "interval", "verdict")
    grid.padding = (0, 1, 0, 0)
    for c in e.comparisons:
        star = "*" if c.metric in e.plan.primary else ""
        change, verdict = (Text(text, STYLE[c.verdict]) for text in (words.change(c.ratio), c.verdict))
        label = Text.assemble(f"{c.label}{star}", (f", {c.unit}", "dim"))
        grid.add_row(label, words.number(c.a), words.number(c.b), change, words.interval(c), verdict)
    return grid


def _wide(e: ExperimentRecord) -> Table:
    grid = _table("metric", "A", "B", "unit", "change", "interval", "p", "noise floor", "verdict")
    for c in e.comparisons:
        star = "*" if c.metric in e.plan.primary else ""
        grid.add_row(
            Text(f"{c.label}{star}"),
            words.number(c.a),
            words.number(c.b),
            Text(c.unit, "dim"),
            Text(words.change(c.ratio), STYLE[c.verdict]),
            words.interval(c),
            words.p_text(c.p_adjusted),
            Text(words.floor(c), "dim"),
            _verdict(c),
        )
    return grid


def _verdict(c: Comparison) -> Text:
    text = Text(c.verdict, STYLE[c.verdict])
    return text.append(f", {c.note}", "dim") if c.note else text


def _side_by_side(e: ExperimentRecord) -> Table:
    grid = _table("", "A", "B", "unit", "change")
    for row in e.side_by_side:
        cells = (words.number(row.a), words.number(row.b), Text(row.unit, "dim"), words.side_ratio(row))
        grid.add_row(Text(row.label), *cells)
    return grid
