"""Show what ``dovetail ab`` prints: both arms, the progress and the result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from dovetail.cli.tables import add, console, table

if TYPE_CHECKING:
    from dovetail.errors import EngineError
    from dovetail.experiment.arms import ResolvedArm
    from dovetail.experiment.result import ExperimentRecord


class ExperimentView:
    """Show the progress and the result of an experiment. Implements ``ProgressWatcher``. With ``quiet`` all output goes to standard error,
    because standard output is reserved for JSON."""

    def __init__(self, *, quiet: bool) -> None:
        self.console = Console(stderr=True, highlight=False) if quiet else console()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[known]}"),
            console=self.console,
        )
        self._task: Any = None

    def __enter__(self) -> ExperimentView:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def stage(self, text: str, total: int) -> None:
        """See ``ProgressWatcher``."""
        self._task = self._progress.add_task(text, total=total, known="")

    def step(self, text: str) -> None:
        """See ``ProgressWatcher``."""
        self._progress.update(self._task, advance=1, known=text)

    def explain(self, a: ResolvedArm, b: ResolvedArm) -> None:
        """Show the components of both arms and why they were chosen, then every setting that differs, then warnings."""
        from dovetail.experiment.arms import differences
        from dovetail.experiment.runner import difference_of, warnings

        parts = table("part", f"A: {' '.join(a.given) or 'base'}", f"B: {' '.join(b.given) or 'base'}")
        for ours, theirs in zip(a.resolved.resolutions, b.resolved.resolutions, strict=True):
            texts = [f"{r.chosen or 'none'} ({r.rule.value})" for r in (ours, theirs)]
            add(parts, ours.slot, texts[0], Text(texts[1], "" if ours.chosen == theirs.chosen else "bold"))
        self.console.print(parts)
        found = differences(a, b)
        if not found:
            self.console.print("\nthe arms are the same: this experiment measures noise (A/A)", style="yellow")
            return
        grid = table("differs", "A", "B", "")
        for d in found:
            add(
                grid,
                d.key,
                d.a,
                d.b,
                Text("set by you", "dim") if d.intended else Text("changed as a consequence", "yellow"),
            )
        self.console.print("", grid)
        for text in warnings(a, b, [difference_of(d) for d in found]):
            self.console.print(text, style="yellow", markup=False)

    def announce(self) -> None:
        """Report before the experiment that there will be no HTML page if matplotlib is missing."""
        from dovetail.experiment.plots import missing

        if (why := missing()) is not None:
            self.console.print(f"There will be no report.html: {why}", style="yellow", markup=False)

    def failed(self, error: EngineError) -> None:
        """Report that an arm failed before the first block."""
        self.console.print(Text.assemble(("error: ", "bold red"), (str(error), "red")), soft_wrap=True)

    def result(self, found: ExperimentRecord, folder: Path) -> None:
        """Show the verdict and its tables."""
        from dovetail.experiment.terminal import render

        self.console.print("", render(found))
        files = [folder / name for name in ("report.html", "experiment.json") if (folder / name).exists()]
        self.console.print(f"\n{', '.join(map(str, files))}", style="dim", markup=False, soft_wrap=True)

    def tuning(self, file: Path, lines: Sequence[str]) -> None:
        """Show which tuning records were written, and why others were not."""
        for line in lines:
            self.console.print(f"tuning: {line}", markup=False)
        self.console.print(f"tuning records: {file}", style="dim", markup=False)
