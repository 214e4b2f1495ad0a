"""Compare two checkouts in turns on one device: an engine of each is in memory, and only one of them works at a time.

    python benchmarks/in_turns.py 682046d6 --model 0.6b --rows mixed,decode:64,decode:256,prefill:1024 --turns 5

The first checkout is a commit of this repository, or a directory; the second is this one, or ``--after``. Each runs the workloads of its own
``benchmarks/gpubench`` once a turn, in the order before, after, after, before. A call takes as long as both engines, so that the speed of the host
and of the device, which changes from minute to minute, changes both alike. Differences of 1 % need an idle host and five turns.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dovetail.config import read
from gpubench.models import settings
from gpubench.plan import SIZES, Job

ROOT = Path(__file__).resolve().parents[1]
PLUGINS = "dovetail.plugins"
ARM = """
import json, sys
from gpubench.plan import Job
from gpubench.worker import claim_stdout, engine, send
channel = claim_stdout()
handle, _ = engine(Job(**json.loads(sys.argv[1])))
send(channel, {"ready": True})
for task in sys.stdin:
    send(channel, {"measures": handle(task.strip())})
"""


@dataclass(frozen=True, slots=True)
class Row:
    """Hold what both checkouts measured of a workload, one number for each turn. ``unit`` is ms, s, tok/s or hit."""

    name: str
    unit: str
    before: list[float]
    after: list[float]

    @property
    def ratio(self) -> float:
        """Return the median after divided by the median before."""
        return statistics.median(self.after) / statistics.median(self.before)


class Arm:
    """Run the engine of one checkout in a process of its own."""

    def __init__(self, name: str, checkout: Path, job: Job, work: Path) -> None:
        self._name, self._log = name, work / f"{name}.log"
        plugins = [folder for folder in sorted((checkout / "plugins").iterdir()) if folder.is_dir()]
        path = [entry_points(checkout, work / name), checkout / "core", *plugins, checkout / "benchmarks"]
        inherited = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", ARM, json.dumps(asdict(job))],
                env={**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), *inherited])},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.receive()

    def receive(self) -> dict[str, Any]:
        """Return the next message of the process. Ends this program, with the end of the process's log, if there is none."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            end = "\n".join(self._log.read_text(errors="replace").splitlines()[-30:])
            sys.exit(f"the engine of the checkout {self._name} ended:\n{end}")
        return json.loads(line)

    def measure(self, task: str) -> list[dict[str, Any]]:
        """Run a workload, ``row`` or ``row:case``, and return its measures as ``gpubench.plan.Measure`` describes them."""
        assert self._process.stdin is not None
        self._process.stdin.write(task + "\n")
        self._process.stdin.flush()
        return self.receive()["measures"]

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def entry_points(checkout: Path, folder: Path) -> Path:
    """Write the metadata of a distribution with the plugins of ``checkout``, and return the directory to import from: they hide
    those of an installed Dovetail, which may have other plugins."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    info = folder / "dovetail-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dovetail\nVersion: 0\n")
    lines = [f"{name} = {module}" for name, module in project["entry-points"][PLUGINS].items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{PLUGINS}]", *lines, ""]))
    return folder


def checked_out(place: str, folder: Path) -> Path:
    """Return ``place`` if it is a directory with a checkout, or else unpack the commit of that name to ``folder``."""
    if (Path(place) / "pyproject.toml").is_file():
        return Path(place).resolve()
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", place], capture_output=True)
    if archive.returncode:
        sys.exit(
            f"{place} is neither a directory with a checkout of Dovetail nor a commit: {archive.stderr.decode().strip()}"
        )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


def in_turns(before: Arm, after: Arm, task: str, turns: int) -> list[Row]:
    """Run a workload once to warm up and ``turns`` times in each of the checkouts."""
    for arm in (before, after):
        arm.measure(task)
    found: dict[Arm, list[list[dict[str, Any]]]] = {before: [], after: []}
    for turn in range(turns):
        for arm in (before, after) if turn % 2 == 0 else (after, before):
            found[arm].append(arm.measure(task))
    first = found[after][0]
    return [
        Row(
            f"{one['row']} {one['case']}".strip(),
            one["unit"],
            *([measures[i]["value"] for measures in found[arm]] for arm in (before, after)),
        )
        for i, one in enumerate(first)
    ]


def report(row: Row) -> str:
    """Return the line of a row: medians, their ratio, and what each turn measured."""
    texts = [" ".join(f"{value:.5g}" for value in values) for values in (row.before, row.after)]
    medians = [statistics.median(values) for values in (row.before, row.after)]
    return f"{row.name:14} {medians[0]:10.5g} {medians[1]:10.5g} {row.unit:6} {row.ratio:7.4f}   before {texts[0]}; after {texts[1]}"


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("before", help="commit of this repository, or directory of a checkout")
    add("--after", default=str(ROOT), help="the same; by default this checkout")
    add("--model", default="0.6b", choices=sorted(SIZES))
    add(
        "--rows",
        default="mixed,decode:64",
        help="mixed, indep, gsp, chat, decode:BATCH or prefill:TOKENS, with commas between",
    )
    add("--turns", type=int, default=5)
    add("--kv-gib", type=float, default=38.0, help="memory of the KV pool of each engine")
    add("--device", default="auto")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="sets",
        help="config key of both; may be repeated",
    )
    add("--json", type=Path)
    args = parser.parse_args(given)
    if args.turns < 1:
        parser.error(f"--turns {args.turns}; allowed: at least 1")
    return args


def main() -> None:
    """Measure both checkouts, print each row when it has been measured, and write ``--json``."""
    args = arguments()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="dovetail-in-turns-") as name:
        work = Path(name)
        values = {**settings(args.model, work), "device": args.device, "memory.kv_gib": args.kv_gib}
        config = read((), [*(f"{key}={json.dumps(value)}" for key, value in values.items()), *args.sets], {}).tree
        job = Job("engine", args.model, config, str(work), 1)
        places = {arm: checked_out(getattr(args, arm), work / f"{arm} files") for arm in ("before", "after")}
        arms = [Arm(arm, place, job, work) for arm, place in places.items()]
        try:
            print(f"{'':14} {'before':>10} {'after':>10} {'':6} {'ratio':>7}", flush=True)
            for task in args.rows.split(","):
                for row in in_turns(*arms, task, args.turns):
                    rows.append(row)
                    print(report(row), flush=True)
        finally:
            for arm in arms:
                arm.end()
    if args.json:
        args.json.write_text(json.dumps([{**asdict(row), "ratio": row.ratio} for row in rows], indent=1))


if __name__ == "__main__":
    main()
