"""``dovetail ab``: two configs against each other, what they answer first, then how fast."""

from __future__ import annotations

import os
import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.cli.outputs import check_writable
from dovetail.cli.sources import Model, Sets, shortcuts

if TYPE_CHECKING:
    from dovetail.bench.records import Workload
    from dovetail.cli.ab_view import View
    from dovetail.experiment.arms import Arm
    from dovetail.experiment.result import Experiment as Finished
    from dovetail.experiment.runner import Experiment

_ARM = "KEY=VALUE, or a config file, over the base. Repeatable."
_LEAST_BLOCKS = 2


def ab(
    base: Annotated[
        list[Path] | None, typer.Argument(metavar="[BASE]...", show_default=False, help="Config files of both arms.")
    ] = None,
    a: Annotated[list[str] | None, typer.Option("--a", metavar="SETTING", help=f"Arm A: {_ARM}")] = None,
    b: Annotated[list[str] | None, typer.Option("--b", metavar="SETTING", help=f"Arm B: {_ARM}")] = None,
    sets: Sets = None,
    model: Model = None,
    workload: Annotated[
        str, typer.Option("--workload", "-w", help="As in `dovetail bench`: a kind, YAML, or a .jsonl file.")
    ] = "chat",
    arrivals: Annotated[
        str | None, typer.Option(help="As in `dovetail bench`: all_at_once, {kind: poisson, rate: 4}, ...")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the workload and of the statistics.")] = 0,
    blocks: Annotated[
        int | None,
        typer.Option(
            min=_LEAST_BLOCKS,
            show_default=False,
            help="So many blocks of four runs, ABBA. By default as many as it takes, up to --max-blocks.",
        ),
    ] = None,
    max_blocks: Annotated[int, typer.Option(min=_LEAST_BLOCKS, help="The most blocks; it stops once it knows.")] = 12,
    delta: Annotated[float, typer.Option(min=0.0, help="Less than this does not matter: 0.02 is 2 %.")] = 0.02,
    alpha: Annotated[float, typer.Option(min=0.0001, max=0.5, help="The chance of a false alarm.")] = 0.05,
    primary: Annotated[
        str | None, typer.Option(help="Metrics that the verdict rests on, by commas.", show_default=False)
    ] = None,
    slo: Annotated[str | None, typer.Option(help="For goodput: ttft:200 tpot:20 e2e:4000, milliseconds.")] = None,
    compare: Annotated[int, typer.Option(min=1, help="Calls whose outputs are compared, at most.")] = 64,
    near_tie: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Nats up to which outputs may part; by default what A against itself shows.",
            show_default=False,
        ),
    ] = None,
    allow_different_outputs: Annotated[
        bool, typer.Option("--allow-different-outputs", help="Measure all the same. Every report says so.")
    ] = False,
    warm_up: Annotated[int, typer.Option(min=0, help="Calls before each run that are not counted.")] = 8,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder of report.html, experiment.json and all runs.", show_default=False),
    ] = None,
    write_tuning: Annotated[
        bool, typer.Option("--write-tuning", help="Keep the winner for `auto` (tuning.path), if there is one.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the experiment as JSON, and nothing else.")] = False,
) -> None:
    """Compare arm A with arm B: what they answer, then how fast they are, in fresh processes that take turns.

    Exit status: 0 no regression, 1 a regression, 2 the outputs differ (or a setting is wrong), 3 inconclusive, 4 an arm failed.
    """
    from dovetail.bench.metrics import parse_slo
    from dovetail.cli.ab_view import View
    from dovetail.experiment.arms import make_arm
    from dovetail.experiment.runner import Experiment, Settings, check_alike
    from dovetail.experiment.verdict import Rules
    from dovetail.plugins.measured import tuning_file

    bounds = parse_slo([slo]) if slo else None
    settings = Settings(
        rules=Rules(alpha, delta, peeking=blocks is None),
        max_blocks=blocks or max_blocks,
        primary=_metrics(primary, goodput=bounds is not None),
        slo=bounds,
        compared=compare,
        near_tie=near_tie,
        allow=allow_different_outputs,
        warm_up=warm_up,
        seed=seed,
        command=shlex.join(["dovetail", *sys.argv[1:]]),
        arrivals=arrivals or "as the workload has them",
    )
    common = [*(sets or ()), *shortcuts({"model.path": model})]
    first, second = (
        make_arm(name, base or (), common, given or (), os.environ) for name, given in (("a", a), ("b", b))
    )
    check_alike(first, second)
    if write_tuning:
        check_writable({"--write-tuning": tuning_file(first.config)})
    view = View(quiet=as_json)
    view.explain(first, second)
    asked = _workload(first, workload, arrivals, seed)
    folder = output or Path(f"ab-{datetime.now():%Y%m%d-%H%M%S}")
    found = _measured(Experiment(first, second, asked, settings, folder, view), view)
    _keep(found, folder)
    view.result(found, folder)
    if write_tuning:
        view.tuning(*_write_tuning(first, second, found))
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
    raise typer.Exit(found.exit_code)


def _measured(experiment: Experiment, view: View) -> Finished:
    """Runs it. Ctrl-C or an arm that fails before there is a block leave nothing to report, and end the command."""
    from dovetail.errors import EngineError
    from dovetail.experiment.result import ARM_FAILED, INCONCLUSIVE

    view.announce()
    try:
        with view:
            return experiment.run()
    except KeyboardInterrupt:
        view.console.print("interrupted before any speed was measured", style="yellow")
        raise typer.Exit(INCONCLUSIVE) from None
    except EngineError as error:
        view.failed(error)
        raise typer.Exit(ARM_FAILED) from None


def _metrics(text: str | None, *, goodput: bool) -> tuple[str, ...]:
    """What ``--primary`` names, or the usual ones. Raises ``ConfigError``."""
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


def _workload(arm: Arm, spec: str, arrivals: str | None, seed: int) -> Workload:
    from dovetail.bench.specs import parse_arrivals, parse_workload
    from dovetail.bench.workloads import Vocabulary, make_workload
    from dovetail.tokenizer import load_tokenizer

    resolved = arm.resolved
    has_tokenizer = arm.config.model.tokenizer or (resolved.model_dir / "tokenizer.json").is_file()
    vocabulary = (
        Vocabulary.of(load_tokenizer(arm.config))
        if has_tokenizer
        else Vocabulary.of_size(resolved.model_info.vocab_size, resolved.model_info.eos_token_ids)
    )
    when = parse_arrivals(arrivals) if arrivals else None
    return make_workload(parse_workload(spec), seed, vocabulary, when)


def _keep(found: Finished, folder: Path) -> None:
    from dovetail.experiment.plots import missing
    from dovetail.experiment.report import write_html

    found.write(folder / "experiment.json")
    if missing() is None:
        write_html(found, folder / "report.html")


def _write_tuning(a: Arm, b: Arm, found: Finished) -> tuple[Path, list[str]]:
    """The file of records, and what is now in it or why not."""
    from dovetail.experiment.tuning import tuning_records
    from dovetail.plugins.measured import add_records, tuning_file

    file = tuning_file(a.config)
    records, reasons = tuning_records(a, b, found)
    if records:
        add_records(file, records)
    return file, [*(f"{record.slot}: {record.winner.name}, {record.why}" for record in records), *reasons]
