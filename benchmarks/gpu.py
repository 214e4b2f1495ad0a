"""Measure Dovetail on a GPU: check every attention backend against float32, then run the workloads and compare with
peers, goals and floor.

    python benchmarks/gpu.py --model both --breakdown --json gpu.json

Two model shapes with random weights in bfloat16 receive random ids with forced output lengths and temperature 0.6,
through ``dovetail.LLM.generate`` (and through ``dovetail serve`` for the row ``http``). Engines run in separate
processes: a crash or the time limit loses only the current row, and earlier results are printed and written. See
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from dovetail.config import read
from dovetail.errors import ConfigError
from gpubench import tables
from gpubench.models import TITLES, VARIANTS, settings, variant
from gpubench.plan import ROWS, SIZES, USUAL_ROWS, Job, Measure, engine_tasks
from gpubench.record import Record
from gpubench.supervise import Deadline, Ended, run_tasks

console = Console(width=None if sys.stdout.isatty() else 160)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=("8b", "0.6b", "both", *VARIANTS), default="both", help="both: 8b and 0.6b, on one GPU")
    add(
        "--rows", metavar="A,B", type=row_names, help=f"of {','.join(ROWS)}; by default those the model has targets for"
    )
    add("--attention", metavar="NAME", help="attention backend, also the only one that is checked")
    add("--set", metavar="KEY=VALUE", action="append", default=[], dest="sets", help="config key; may be repeated")
    add("--json", metavar="FILE", type=Path, help="write the results there, after every row")
    add("--breakdown", action="store_true", help="also show where the time of a decode step goes")
    add("--check", action=argparse.BooleanOptionalAction, default=True, help="check the attention backends first")
    add("--quick", action="store_true", help="one run of each row, fewer cases, one page size")
    add("--time-limit", metavar="SECONDS", type=float, help="for the checks, and for each model")
    add("--device", default="auto", help="config's device")
    add(
        "--tiny-shapes",
        action="store_true",
        help="a tiny model and lengths, only to check that everything runs; the numbers mean nothing",
    )
    add("--work", metavar="DIR", type=Path, help="models and logs; by default a temporary directory")
    args = parser.parse_args(given)
    if variant(args.model).routing and "http" in (args.rows or ()):
        parser.error(f"{args.model}: a server's routers cannot be replaced; leave http out of --rows")
    return args


def row_names(text: str) -> tuple[str, ...]:
    """Parse ``a,b`` as names of rows."""
    names = tuple(name.strip() for name in text.split(","))
    if unknown := [name for name in names if name not in ROWS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there is no such row; allowed: {', '.join(ROWS)}")
    return names


def main() -> None:
    """Measure, print, write. The exit status is 1 if a backend is wrong or anything failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # exit through the code that ends the workers
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="dovetail-gpu-") as folder:
        args.work = (args.work or Path(folder)).resolve()
        bench = Bench(args)
        try:
            bench.run()
        finally:
            bench.show()
    if bench.record.wrong or bench.record.failed:
        sys.exit(1)


class Bench:
    """Run the benchmark once. ``record`` holds the results, also after an interruption."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.record = Record(about=about())
        self.models = ("tiny",) if args.tiny_shapes else ("8b", "0.6b") if args.model == "both" else (args.model,)
        for name in self.models:
            self.config(name)  # report a mistake in --set before anything is started

    def run(self) -> None:
        """Run everything that was selected."""
        if self.args.check:
            self.check()
        for model in self.models:
            console.rule(TITLES[model])
            self.measure(model)

    def check(self) -> None:
        """Check the attention backends, all in one worker as long as none of them crashes."""
        from gpubench.correctness import check_tasks, names

        backends = [b for b in names() if self.args.attention in (None, b) or b == "torch_native"]
        job = self.job("check", self.models[0])
        tasks = check_tasks(backends, quick=self.args.quick)
        for ended in run_tasks(job, tasks, Deadline(self.args.time_limit)):
            self.take(ended, "check")
            if ended.result is not None and ended.task != "start":
                self.record.checks[ended.task] = ended.result
            self.save()
        console.print(tables.correctness(self.record))

    def measure(self, model: str) -> None:
        """Measure the rows of one model. The engine's process ends before the server starts."""
        args, deadline = self.args, Deadline(self.args.time_limit)
        rows = args.rows or USUAL_ROWS[model]
        self.record.measures[model] = []
        tasks = engine_tasks(model, rows, quick=args.quick, breakdown=args.breakdown)
        for ended in run_tasks(self.job("engine", model), tasks, deadline) if tasks else ():
            self.take(ended, model)
            self.keep(model, ended)
        if "json" in rows or "compile" in rows:
            batches = SIZES[model].json_batches[: 1 if args.quick else None]
            tasks = [f"json:{batch}" for batch in batches if "json" in rows]
            tasks += [f"compile:{batches[-1]}"] if "compile" in rows else []
            for ended in run_tasks(self.job("json", model), tasks, deadline):
                self.take(ended, model)
                if ended.task != "start":
                    self.keep(model, ended)
        if "http" in rows:
            self.http(model, deadline)
        if "startup" in rows:
            self.startup(model, deadline)

    def keep(self, model: str, ended: Ended) -> None:
        """Record the result of an engine's task."""
        if ended.result is None:
            return
        if ended.task == "start":
            self.record.engines[model] = ended.result
        elif ended.task.startswith("breakdown:"):
            self.record.breakdowns.setdefault(model, []).append(ended.result)
        else:
            self.add(model, [Measure(**measure) for measure in ended.result])
        self.save()

    def http(self, model: str, deadline: Deadline) -> None:
        """Measure streams from a server, and compare with the engine's own time at the same batch size."""
        from gpubench.serving import ServingError, measure

        if deadline.passed:
            self.take(Ended("http", left_out=True), model)
            return
        in_process = self.record.value(model, "decode", f"bs {SIZES[model].http[0]}")
        try:
            self.add(model, measure(self.job("http", model), in_process, deadline))
        except TimeoutError:
            self.take(Ended("http", left_out=True), model)
        except (ServingError, OSError) as error:
            self.take(Ended("http", error=str(error)), model)

    def startup(self, model: str, deadline: Deadline) -> None:
        """Measure start-up in a fresh process each time; the best counts, because by then the page cache is warm."""
        found: list[dict[str, float]] = []
        for _ in range(1 if self.args.quick else 2):
            for ended in run_tasks(self.job("startup", model), ["startup"], deadline):
                self.take(ended, model)
                if ended.task == "startup" and ended.result is not None:
                    found.append(ended.result)
        if found:
            seconds = [one["seconds"] for one in found]
            self.add(model, [Measure("startup", "", min(seconds), "s", seconds, {"runs": found})])

    def add(self, model: str, measures: list[Measure]) -> None:
        """Record numbers and print them at once."""
        self.record.measures[model] += measures
        for m in measures:
            console.print(f"{model} {m.row} {m.case}: {m.value:.4g} {m.unit}", highlight=False, markup=False)
        self.save()

    def take(self, ended: Ended, where: str) -> None:
        """Record what failed or was left out, and print it at once."""
        name = f"{where} {ended.task}".rstrip(":")
        if ended.left_out:
            self.record.left_out.append(name)
        elif ended.error is not None:
            self.record.failed[name] = ended.error
            console.print(f"{name} failed: {ended.error}", style="red", markup=False, highlight=False)

    def config(self, model: str) -> dict[str, Any]:
        """Return Dovetail's config: the model, and the settings of the command line."""
        args = self.args
        values = {**settings(model, args.work), "device": args.device}
        values |= {"attention": args.attention} if args.attention else {}
        try:
            return read((), [*(f"{key}={json.dumps(value)}" for key, value in values.items()), *args.sets], {}).tree
        except ConfigError as error:
            sys.exit(str(error))

    def job(self, kind: str, model: str) -> Job:
        """Return the job that a worker receives."""
        return Job(kind, model, self.config(model), str(self.args.work), 1 if self.args.quick else 2)

    def save(self) -> None:
        """Write the results so far."""
        if self.args.json:
            self.record.save(self.args.json)

    def show(self) -> None:
        """Print the results so far."""
        record = self.record
        for model, found in record.breakdowns.items():
            console.print(tables.breakdowns(found, TITLES[model]))
            for part in found:
                if part.get("top"):
                    console.print(tables.top_kernels(part))
        if any(record.measures.values()):
            console.print(tables.results(record))
        if record.wrong:
            console.print(f"WRONG attention: {', '.join(record.wrong)}", style="bold red", highlight=False)
        for name, error in record.failed.items():
            console.print(f"{name} failed: {error.splitlines()[-1]}", style="red", markup=False, highlight=False)
        if record.left_out:
            console.print(f"left out, the time limit had passed: {', '.join(record.left_out)}", style="yellow")
        self.save()


def about() -> dict[str, Any]:
    """Return the facts on which the numbers depend; the others are in ``engines``."""
    command = ["python", "benchmarks/gpu.py", *sys.argv[1:]]
    return {"command": shlex.join(command), "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}


if __name__ == "__main__":
    main()
