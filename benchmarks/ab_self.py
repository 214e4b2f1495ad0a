"""Check whether `dovetail ab` is reliable: run experiments whose outcome is known, or nearly known, on this machine.

    python benchmarks/ab_self.py self --seeds 20        the same config against itself: only equivalent or inconclusive
    python benchmarks/ab_self.py slow                   a tenth more time in every step: slower
    python benchmarks/ab_self.py cache                  prefix cache radix against none, on prompts that share prefixes
    python benchmarks/ab_self.py attention              torch_native against triton, whose kernels are interpreted here

The last three run the command as a user would. ``self`` runs the same experiment from Python, with 280 processes that
are forked from one that has imported torch. ``--write`` puts the table into docs/ab.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dovetail.experiment.jobs import ArmJob
from dovetail.experiment.result import ExperimentRecord
from dovetail.experiment.worker import do_job
from peers.report import replace_section

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "ab.md"
COMMON = ("--set", "threads=1", "--set", "device=cpu", "--set", "tuning.use=false")
RANDOM = "{kind: random, count: 16, input: [16, 48], output: [16, 32]}"
LONG = "{kind: random, count: 16, input: [16, 48], output: [96, 128]}"
SHARED = "{kind: shared_prefix, groups: 4, per_group: 6, prefix: 384, suffix: 16, output: 16}"
FEW = "{kind: shared_prefix, groups: 2, per_group: 3, prefix: 48, suffix: 8, output: 6}"


@dataclass(frozen=True)
class Trial:
    """Describe one experiment: ``arguments`` of the command, the allowed verdicts, and whether kernels are
    interpreted."""

    name: str
    arguments: tuple[str, ...]
    allowed: tuple[str, ...]
    interpreted: bool = False


def trials(options: argparse.Namespace) -> Iterator[Trial]:
    """Yield the trials of a subcommand."""
    fixed = ("--blocks", str(options.blocks))
    if options.what == "slow":
        arms = ("--a", "attention=torch_native", "--b", "attention={kind: slowed, share: 0.1}")
        stop = ("--primary", "tpot_mean", "--max-blocks", str(options.max_blocks))
        yield Trial("a tenth slower", (*arms, "-w", LONG, *stop), ("slower",))
    elif options.what == "cache":
        arms = ("--a", "cache=none", "--b", "cache=radix")
        yield Trial("none against radix", (*arms, "-w", SHARED, "--max-blocks", str(options.max_blocks)), ("faster",))
    else:
        arms = ("--a", "attention=torch_native", "--b", "attention=triton_interpreted")
        yield Trial("torch_native against triton", (*arms, "-w", FEW, "--warm-up", "1", *fixed), ("slower",), True)


class Silent:
    """Ignore the progress of an experiment."""

    def stage(self, text: str, total: int) -> None:
        """Ignore the beginning of a stage."""

    def step(self, text: str) -> None:
        """Ignore the end of a step."""


def against_itself(seed: int, blocks: int, folder: Path) -> tuple[int, dict[str, Any], str]:
    """Run A/A: one config, with one workload of this seed."""
    from dovetail.bench.specs import parse_workload
    from dovetail.bench.workloads import PromptVocabulary, make_workload
    from dovetail.experiment.arms import make_arm
    from dovetail.experiment.runner import ExperimentRunner, ExperimentSettings
    from dovetail.tokenizer import load_tokenizer

    sets = [text for text in COMMON if text != "--set"]
    a, b = (make_arm(name, (), sets, (), {}) for name in "ab")
    asked = make_workload(parse_workload(RANDOM), seed, PromptVocabulary.of(load_tokenizer(a.config)))
    settings = ExperimentSettings(max_blocks=blocks, seed=seed)
    found = ExperimentRunner(a, b, asked, settings, folder, Silent(), forked).run()
    words = ["dovetail", "ab", "-w", RANDOM, "--seed", str(seed), "--max-blocks", str(blocks), *COMMON]
    return found.exit_code, found.model_dump(mode="json"), shlex.join(words)


def forked(job: ArmJob) -> None:
    """Run ``jobs.run_job`` without the imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dovetail.experiment.worker", "dovetail.loop", "dovetail_attention.torch_native"])
    process = context.Process(target=do_job, args=(job.model_copy(update={"launched": time.time()}),))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{job.output} failed with status {process.exitcode}")


def run(trial: Trial, folder: Path) -> tuple[int, dict[str, Any], str]:
    """Run the command. Return its exit code, the experiment, and the command as the page shows it."""
    about = folder / "abplugin-0.1.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: abplugin\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("[dovetail.plugins]\nabplugin = abplugin_entry\n")
    paths = [str(folder), str(HERE / "abplugin"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    if trial.interpreted:
        env["TRITON_INTERPRET"] = "1"
    arguments = ["ab", *trial.arguments, *COMMON]
    command = [sys.executable, "-c", "from dovetail.cli import main; main()", *arguments, "--json"]
    done = subprocess.run([*command, "-o", str(folder / "out")], env=env, capture_output=True, text=True, check=False)
    if not done.stdout.startswith("{"):
        raise SystemExit(f"{trial.name} did not run:\n{done.stderr[-3000:]}")
    return done.returncode, json.loads(done.stdout), shlex.join(["dovetail", *arguments])


def rows(found: dict[str, Any]) -> Iterator[str]:
    """Yield the comparisons of an experiment as rows of a table."""
    primary = found["plan"]["primary"]
    for c in found["comparisons"]:
        if c["ratio"] is None:
            continue
        bounds = "-" if c["low"] is None or c["high"] is None else f"{c['low']:.3f} to {c['high']:.3f}"
        name = f"**{c['label']}**" if c["metric"] in primary else c["label"]
        yield f"| {name} | {c['a']:.4g} {c['unit']} | {c['b']:.4g} {c['unit']} | {c['ratio']:.3f} | {bounds} | {c['verdict']} |"


def table(found: dict[str, Any], command: str) -> str:
    """Return an experiment as the page shows it."""
    gate = found["gate"]
    kl = f", KL {gate['kl_mean']:.1e} nats a token" if gate["kl_mean"] is not None else ""
    beside = "; ".join(
        f"{row['label']}: {row['a']:.3g} against {row['b']:.3g} {row['unit']}"
        for row in found["side_by_side"]
        if row["a"] is not None and row["b"] is not None
    )
    return "\n".join(
        [
            f"```\n{command}\n```",
            "",
            f"Outputs: {gate['outcome']}; {gate['reason']}{kl}. {len(found['blocks'])} blocks; {found['plan']['stopped']}.",
            "",
            "| metric | A | B | B / A | interval | verdict |",
            "|---|---|---|---|---|---|",
            *rows(found),
            "",
            f"{beside}.",
        ]
    )


def verdict(found: dict[str, Any]) -> str:
    """Return the verdict on B, or that the outputs differ."""
    reported = ExperimentRecord.model_validate(found)
    return "outputs differ" if reported.gate.outcome == "failed" else reported.verdict


def summary_of_self(results: Sequence[tuple[int, dict[str, Any], str]]) -> str:
    """Return how often identical configs were judged to be different."""
    verdicts = [verdict(found) for _, found, _ in results]
    held = sum(word in ("equivalent", "inconclusive") for word in verdicts)
    spread = [c["ratio"] for _, found, _ in results for c in found["comparisons"] if c["metric"] == "tpot_mean"]
    same = sum(found["gate"]["identical"] == found["gate"]["compared"] for _, found, _ in results)
    reported = ", ".join(f"{verdicts.count(word)} {word}" for word in sorted(set(verdicts)))
    return "\n".join(
        [
            f"```\n{results[0][2]}\n```",
            f"and so on for {len(results)} seeds:",
            "",
            f"{held} of {len(results)} without a false alarm: {reported}. Outputs the same in all requests in {same}. "
            f"Estimates of TPOT, B / A: {min(spread):.3f} to {max(spread):.3f}.",
        ]
    )


def main() -> None:
    """Run the trials of a subcommand. The exit status is 1 if a result is not as expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("self", "slow", "cache", "attention"))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--max-blocks", type=int, default=12)
    parser.add_argument("--write", action="store_true", help="into docs/ab.md")
    options = parser.parse_args()
    results, wrong = [], 0
    itself = options.what == "self"
    experiments = (
        [Trial(f"A/A, seed {i}", (), ("equivalent", "inconclusive")) for i in range(options.seeds)]
        if itself
        else list(trials(options))
    )
    for seed, trial in enumerate(experiments):
        with tempfile.TemporaryDirectory(prefix="dovetail-ab-") as folder:
            made = against_itself(seed, options.blocks, Path(folder)) if itself else run(trial, Path(folder))
        results.append(made)
        reported = verdict(made[1])
        wrong += reported not in trial.allowed
        print(f"{trial.name}: {reported}{'' if reported in trial.allowed else ', WRONG'}", flush=True)
    text = summary_of_self(results) if options.what == "self" else table(results[0][1], results[0][2])
    machine = f"{results[0][1]['machine']['host_cpu']}, {len(os.sched_getaffinity(0))} CPUs, Python {platform.python_version()}"
    text = f"{text}\n\n{datetime.now(UTC):%Y-%m-%d}, {machine}; load of the machine when it ended: {os.getloadavg()[0]:.1f}."
    print(f"\n{text}")
    if options.write:
        replace_section(PAGE, f"ab {options.what}", text)
    allowed_alarms = len(results) // 20
    sys.exit(1 if wrong > allowed_alarms else 0)


if __name__ == "__main__":
    main()
