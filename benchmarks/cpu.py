"""Compare the offline speed of Dovetail, transformers' ``generate`` and vLLM's CPU build on this machine's CPU, in one
run.

    .venv/bin/python benchmarks/cpu.py --vllm-python ~/vllm-cpu/bin/python --docs docs/benchmarks.md

Every arm is a separate process that is stopped while the others run. All use the same CPUs, weights and token ids, and
output lengths are forced. Rounds interleave the arms in rotating order, each round has fresh random prompts and cold
prefix caches, and ratios are paired by round. ``--profile`` shows instead how the time of Dovetail's arm is spent. See
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from peers import report
from peers.arms import Arm, ArmError, Process, Run, measured
from peers.models import SHAPES, Model, prepare
from peers.worker import Setup
from peers.workloads import SIZES, Workload, workloads

ROOT = Path(__file__).resolve().parent.parent
EMBEDDED = ROOT / "core" / "dovetail" / "assets" / "tiny"
DTYPES = ("float32", "bfloat16")
WORKLOADS = tuple(w.name for w in workloads(SIZES["tiny"]))
VLLM_ARMS = {
    "vllm-eager": {"enforce_eager": True},
    "vllm": {},
    "vllm-uni": {"distributed_executor_backend": "uni"},
}
"""The arms of vLLM. ``vllm`` is compiled with default settings; ``vllm-uni`` also avoids the step from the engine's
process to a worker's."""
SUBJECT = "dovetail"
ARMS = ("hf", *VLLM_ARMS, SUBJECT)
DEFAULT_ARMS = ("hf", "vllm-eager", "vllm", SUBJECT)
BUSY = 0.03
"""The share of one CPU above which the CPU time of idle arms is reported."""

QUIET = 0.5
"""The load of the machine above which the benchmark warns about other work on it."""

console = Console(width=None if sys.stdout.isatty() else 132)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--vllm-python", metavar="PATH", help="Python of the venv that holds vLLM's CPU build; without it no vLLM arms")
    add("--hf-python", metavar="PATH", default=sys.executable, help="Python that has transformers")
    add("--work", metavar="DIR", type=Path, default=ROOT / ".bench", help="models, compile caches, logs, results")
    add("--rounds", type=int, default=5, help="measured rounds of each row; one more is dropped as warm-up")
    add("--threads", type=int, default=2, help="CPU threads of each arm, on the first CPUs of this process")
    add("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    add("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    add("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    add("--arms", nargs="+", choices=ARMS, default=list(DEFAULT_ARMS))
    add("--sections", metavar="JSON", type=json.loads, default={}, help="config sections of Dovetail, to try others")
    add("--env", metavar="NAME=VALUE", nargs="+", type=variable, default=[], help="environment variables of every arm")
    add(
        "--smoke",
        action="store_true",
        help="a few tokens per workload, only to check that everything runs; the numbers mean nothing",
    )
    add("--profile", action="store_true", help="profile Dovetail's arm on each row instead of comparing")
    add("--docs", metavar="FILE", type=Path, help="Markdown file whose section `cpu` is replaced by the results")
    return parser.parse_args()


def variable(text: str) -> tuple[str, str]:
    """Parse ``NAME=VALUE``."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def main() -> None:
    """Measure, print, write."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # exit through the code that ends the arms
    args = arguments()
    args.work = args.work.resolve()
    started, load = datetime.datetime.now(datetime.UTC), os.getloadavg()[0]
    if load > QUIET:
        console.print(f"[yellow]the machine is busy (load {load:.1f}): the numbers will be those of a busy machine[/]")
    if args.profile:
        profile(args)
        return
    arms = available_arms(args)
    rows: list[report.Row] = []
    versions: dict[str, str] = {}
    weights: dict[str, str] = {}
    for model, dtype in groups(args):
        weights[model.name] = model.note
        rows += measure_group(args, arms, model, dtype, versions)
    minutes = (datetime.datetime.now(datetime.UTC) - started).total_seconds() / 60
    publish(args, arms, rows, {**facts(args, load, versions, weights), "took": f"{minutes:.1f} minutes"})


def available_arms(args: argparse.Namespace) -> list[Arm]:
    """Return the selected arms that can be started here. The first is the reference for tokens."""
    env = dict(args.env)
    arms = [Arm("hf", "hf_arm", args.hf_python, env=env)]
    if args.vllm_python:
        python = str(Path(args.vllm_python).expanduser().absolute())
        arms += [Arm(name, "vllm_arm", python, options, env) for name, options in VLLM_ARMS.items()]
    else:
        console.print("[yellow]no --vllm-python: vLLM is not measured[/]")
    arms.append(subject(args))
    return [arm for arm in arms if arm.name in args.arms]


def subject(args: argparse.Namespace) -> Arm:
    """Return Dovetail's arm."""
    return Arm(SUBJECT, "dovetail_arm", sys.executable, args.sections, dict(args.env))


def groups(args: argparse.Namespace) -> Iterator[tuple[Model, str]]:
    """Yield each model in each dtype."""
    for name in args.models:
        model = prepare(name, args.work, args.hf_python, EMBEDDED)
        for dtype in args.dtypes:
            yield model, dtype


def measure_group(
    args: argparse.Namespace, arms: Sequence[Arm], model: Model, dtype: str, versions: dict[str, str]
) -> list[report.Row]:
    """Measure all workloads of one model in one dtype."""
    console.rule(f"{model.name} ({model.note}), {dtype}")
    with processes(args, arms, model, dtype) as (running, failed):
        for process in running:
            versions |= process.versions
        rows = [measure(args, running, model, dtype, workload) for workload in chosen(args, model)]
    for row in rows:
        row.failed |= failed
    return rows


@contextmanager
def processes(
    args: argparse.Namespace, arms: Sequence[Arm], model: Model, dtype: str
) -> Iterator[tuple[list[Process], dict[str, str]]]:
    """Start the arms one after another. Return the running processes, and the reason for each arm that cannot start."""
    running: list[Process] = []
    failed: dict[str, str] = {}
    with ExitStack() as stack:
        for arm in arms:
            setup = Setup(str(model.path), dtype, args.threads, arm.options)
            try:
                with console.status(f"starting {arm.name}"):
                    running.append(Process(arm, setup, args.work))
            except ArmError as error:
                failed[arm.name] = str(error)
                console.print(str(error), style="red", markup=False)
                continue
            stack.callback(running[-1].close)
        yield running, failed


def chosen(args: argparse.Namespace, model: Model) -> list[Workload]:
    """Return the selected workloads in the sizes of a model."""
    found = [w for w in workloads(SIZES[model.name]) if w.name in args.workloads]
    return [w.smoke() for w in found] if args.smoke else found


def measure(
    args: argparse.Namespace, running: Sequence[Process], model: Model, dtype: str, workload: Workload
) -> report.Row:
    """Measure the rounds of a row, with the arms in rotating order. Round 0 is a warm-up and is dropped; its tokens
    are compared."""
    row = report.Row(model.name, dtype, workload.name, workload.title, workload.useful_tokens)
    tokens: dict[str, list[list[int]]] = {}
    for number in range(args.rounds + 1):
        prompts = workload.prompts(model.vocab_size, seed=number)
        for process, run in one_round(row, running, number, workload, prompts):
            if number == 0:
                tokens[process.arm.name] = run.tokens
            else:
                row.seconds.setdefault(process.arm.name, []).append(run.seconds)
                row.others_cpu = max(row.others_cpu, run.others_cpu)
    for name in [p.arm.name for p in running if p.arm.name in row.failed]:
        row.seconds.pop(name, None)
    row.same_tokens = report.agreements_with_first({p.arm.name: tokens.get(p.arm.name) for p in running})
    rates = "  ".join(f"{p.arm.name} {report.rate_cell(row, p.arm.name, ranges=True)}" for p in running)
    console.print(f"{workload.title}: {rates}", markup=False, highlight=False, soft_wrap=True)
    return row


def one_round(
    row: report.Row, running: Sequence[Process], number: int, workload: Workload, prompts: list[list[int]]
) -> Iterator[tuple[Process, Run]]:
    """Run each arm that has not failed yet once, starting with another arm each round. Mutates ``row.failed``."""
    first = number % max(len(running), 1)
    for process in [*running[first:], *running[:first]]:
        if process.arm.name in row.failed:
            continue
        try:
            yield process, measured(process, [p for p in running if p is not process], workload, prompts)
        except ArmError as error:
            row.failed[process.arm.name] = str(error)
            console.print(str(error), style="red", markup=False)


def facts(args: argparse.Namespace, load: float, versions: dict[str, str], weights: dict[str, str]) -> dict[str, str]:
    """Return the facts on which the numbers depend."""
    return {
        "command": f"`{' '.join(['python', *map(shlex.quote, public(sys.argv))])}`",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": f"{cpu_model()}, {os.cpu_count()} CPUs, {args.threads} threads each; load before the start {load:.1f}",
        "versions": ", ".join(f"{name} {v}" for name, v in sorted(versions.items()))
        + f", Python {platform.python_version()}",
        "models": ", ".join(f"{name}: {note}" for name, note in weights.items()),
        "rounds": f"{args.rounds}, median (min-max)" + (", SMOKE: the numbers mean nothing" if args.smoke else ""),
    }


def public(command: Sequence[str]) -> list[str]:
    """Return the command line with paths reduced to their last parts, because a document should not contain the
    paths of one machine."""
    return ["/".join(Path(word).parts[-2:]) if word.startswith("/") else word for word in command]


def cpu_model() -> str:
    """Return the CPU's name as Linux reports it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next(
        (text.split(":", 1)[1].strip() for text in lines if text.startswith("model name")), platform.processor()
    )


def publish(args: argparse.Namespace, arms: Sequence[Arm], rows: Sequence[report.Row], about: dict[str, str]) -> None:
    """Print the table, and write results.json, results.md and the section of ``--docs``."""
    names = [arm.name for arm in arms]
    console.print(report.console_table(rows, names, SUBJECT))
    for row in rows:
        if row.others_cpu > BUSY:
            text = f"{row.model} {row.dtype} {row.workload}: idle arms used up to {row.others_cpu:.0%} of a CPU"
            console.print(text, style="yellow", markup=False)
    text = report.markdown(rows, names, SUBJECT, about)
    result = {"about": about, "rows": [row.to_json(SUBJECT) for row in rows]}
    (args.work / "cpu.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.work / "cpu.md").write_text(text)
    console.print(f"written: {args.work / 'cpu.json'}, {args.work / 'cpu.md'}; {about['took']}", highlight=False)
    if args.docs:
        report.replace_section(args.docs, "cpu", text)


def profile(args: argparse.Namespace) -> None:
    """Print how the time of Dovetail's arm is spent: per step, per Python function, per torch operation."""
    for model, dtype in groups(args):
        with processes(args, [subject(args)], model, dtype) as (running, _):
            for process in running:
                for workload in chosen(args, model):
                    console.rule(f"{model.name}, {dtype}, {workload.title}")
                    print(process.profile(workload, workload.prompts(model.vocab_size, seed=0)))


if __name__ == "__main__":
    main()
