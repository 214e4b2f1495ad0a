"""Compare two configs, first their outputs and then their speed: ``dovetail ab``."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dovetail.cli.ab_options import AbOptions
from dovetail.cli.outputs import check_writable
from dovetail.cli.sources import shortcuts
from dovetail.cli.spread import spread

if TYPE_CHECKING:
    from dovetail.bench.records import Workload
    from dovetail.cli.ab_view import ExperimentView
    from dovetail.experiment.arms import ResolvedArm
    from dovetail.experiment.result import ExperimentRecord
    from dovetail.experiment.runner import ExperimentRunner


@spread
def ab(options: AbOptions) -> None:
    """Compare arm A with arm B: their outputs, then their speed, in fresh processes that run in turns.

    Exit status: 0 no regression, 1 a regression, 2 the outputs differ (or a setting is wrong), 3 inconclusive, 4 an arm failed.
    """
    from dovetail.cli.ab_view import ExperimentView
    from dovetail.experiment.runner import ExperimentRunner, check_vocabularies
    from dovetail.registry.measured import tuning_file

    settings = options.settings()
    first, second = _arms(options)
    check_vocabularies(first, second)
    if options.write_tuning:
        check_writable({"--write-tuning": tuning_file(first.config)})
    view = ExperimentView(quiet=options.as_json)
    view.explain(first, second)
    workload = _workload(first, options.workload, options.arrivals, options.seed)
    folder = options.output or Path(f"ab-{datetime.now():%Y%m%d-%H%M%S}")
    found = _measured(ExperimentRunner(first, second, workload, settings, folder, view), view)
    _keep(found, folder)
    view.result(found, folder)
    if options.write_tuning:
        view.tuning(*_write_tuning(first, second, found))
    if options.as_json:
        typer.echo(found.model_dump_json(indent=2))
    raise typer.Exit(found.exit_code)


def _arms(options: AbOptions) -> tuple[ResolvedArm, ResolvedArm]:
    from dovetail.experiment.arms import make_arm

    common = [*(options.sets or ()), *shortcuts({"model.path": options.model})]
    a, b = (
        make_arm(name, options.base or (), common, given or (), os.environ)
        for name, given in (("a", options.a), ("b", options.b))
    )
    return a, b


def _measured(experiment: ExperimentRunner, view: ExperimentView) -> ExperimentRecord:
    """Run the experiment. If Ctrl-C or a failing arm ends it before the first block, there is nothing to report, and the command exits."""
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


def _workload(arm: ResolvedArm, spec: str, arrivals: str | None, seed: int) -> Workload:
    from dovetail.bench.specs import parse_arrivals, parse_workload
    from dovetail.bench.workloads import PromptVocabulary, make_workload
    from dovetail.tokenizer import load_tokenizer

    resolved = arm.resolved
    has_tokenizer = arm.config.model.tokenizer or (resolved.model_dir / "tokenizer.json").is_file()
    vocabulary = (
        PromptVocabulary.of(load_tokenizer(arm.config))
        if has_tokenizer
        else PromptVocabulary.of_size(resolved.model_info.vocab_size, resolved.model_info.eos_token_ids)
    )
    when = parse_arrivals(arrivals) if arrivals else None
    return make_workload(parse_workload(spec), seed, vocabulary, when)


def _keep(found: ExperimentRecord, folder: Path) -> None:
    from dovetail.experiment.plots import missing
    from dovetail.experiment.report import write_html

    found.write(folder / "experiment.json")
    if missing() is None:
        write_html(found, folder / "report.html")


def _write_tuning(a: ResolvedArm, b: ResolvedArm, found: ExperimentRecord) -> tuple[Path, list[str]]:
    """Return the file of tuning records, and a line for each new record and for each slot without one."""
    from dovetail.experiment.tuning import tuning_records
    from dovetail.registry.measured import add_records, tuning_file

    file = tuning_file(a.config)
    records, reasons = tuning_records(a, b, found)
    if records:
        add_records(file, records)
    return file, [*(f"{record.slot}: {record.winner.name}, {record.why}" for record in records), *reasons]
