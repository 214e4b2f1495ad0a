"""Define the options of ``dovetail ab``."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.cli.sources import Model, Sets

if TYPE_CHECKING:
    from dovetail.experiment.runner import ExperimentSettings

_ARM = "KEY=VALUE, or a config file, which overrides the base. Repeatable."
_LEAST_BLOCKS = 2
WORKLOAD = "{kind: chat, conversations: 96, turns: [1, 3]}"
"""The default workload. Its steps have more than 64 rows: some kernels take another path there."""


@dataclass(frozen=True, slots=True)
class AbOptions:
    """Hold the options as they are given."""

    base: Annotated[
        list[Path] | None, typer.Argument(metavar="[BASE]...", show_default=False, help="Config files of both arms.")
    ] = None
    a: Annotated[list[str] | None, typer.Option("--a", metavar="SETTING", help=f"Arm A: {_ARM}")] = None
    b: Annotated[list[str] | None, typer.Option("--b", metavar="SETTING", help=f"Arm B: {_ARM}")] = None
    sets: Sets = None
    model: Model = None
    workload: Annotated[
        str, typer.Option("--workload", "-w", help="As in `dovetail bench`: a kind, YAML, or a .jsonl file.")
    ] = WORKLOAD
    arrivals: Annotated[
        str | None, typer.Option(help="As in `dovetail bench`: all_at_once, {kind: poisson, rate: 4}, ...")
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of the workload and of the statistics.")] = 0
    blocks: Annotated[
        int | None,
        typer.Option(
            min=_LEAST_BLOCKS,
            show_default=False,
            help="Number of blocks of four runs (ABBA). By default until the result is decided, up to --max-blocks.",
        ),
    ] = None
    max_blocks: Annotated[
        int, typer.Option(min=_LEAST_BLOCKS, help="Largest number of blocks; the experiment stops once it is decided.")
    ] = 12
    delta: Annotated[
        float, typer.Option(min=0.0, help="Relative difference that is too small to matter: 0.02 is 2 %.")
    ] = 0.02
    alpha: Annotated[float, typer.Option(min=0.0001, max=0.5, help="Probability of a false alarm.")] = 0.05
    primary: Annotated[
        str | None, typer.Option(help="Metrics that determine the verdict, separated by commas.", show_default=False)
    ] = None
    slo: Annotated[str | None, typer.Option(help="For goodput: ttft:200 tpot:20 e2e:4000, milliseconds.")] = None
    compare: Annotated[int, typer.Option(min=1, help="Largest number of calls whose outputs are compared.")] = 128
    near_tie: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Largest margin of a near tie in nats; by default from A compared with itself.",
            show_default=False,
        ),
    ] = None
    allow_different_outputs: Annotated[
        bool,
        typer.Option("--allow-different-outputs", help="Measure even if the outputs differ. Every report mentions it."),
    ] = False
    warm_up: Annotated[int, typer.Option(min=0, help="Calls before each run that are not measured.")] = 8
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder of report.html, experiment.json and all runs.", show_default=False),
    ] = None
    write_tuning: Annotated[
        bool, typer.Option("--write-tuning", help="Record the winner for `auto` (tuning.path), if there is one.")
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print the experiment as JSON, and nothing else.")] = False

    def settings(self) -> ExperimentSettings:
        """Return the settings of the experiment. Raises ``ConfigError``."""
        from dovetail.bench.metrics import parse_slo
        from dovetail.experiment.runner import ExperimentSettings
        from dovetail.experiment.verdict import Rules

        bounds = parse_slo([self.slo]) if self.slo else None
        return ExperimentSettings(
            rules=Rules(self.alpha, self.delta, peeking=self.blocks is None),
            max_blocks=self.blocks or self.max_blocks,
            primary=_metrics(self.primary, goodput=bounds is not None),
            slo=bounds,
            compared=self.compare,
            near_tie=self.near_tie,
            allow=self.allow_different_outputs,
            warm_up=self.warm_up,
            seed=self.seed,
            command=shlex.join(["dovetail", *sys.argv[1:]]),
            arrivals=self.arrivals or "as the workload has them",
        )


def _metrics(text: str | None, *, goodput: bool) -> tuple[str, ...]:
    """Return the metrics that ``--primary`` names, or the default ones. Raises ``ConfigError``."""
    from dovetail.errors import ConfigError
    from dovetail.experiment.samples import METRICS, PRIMARY

    if text is None:
        return PRIMARY
    known = [metric.name for metric in METRICS if goodput or metric.name != "goodput"]
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names or (text,):
        if name not in known:
            hint = "; goodput needs --slo" if name == "goodput" else ""
            raise ConfigError(f"--primary names {name!r}; allowed: {', '.join(known)}{hint}")
    return names
