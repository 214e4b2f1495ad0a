"""Compare the host time of decode and verify steps of two checkouts, in turns.

    git worktree add /tmp/before COMMIT
    python benchmarks/host_time.py /tmp/before . --turns 6

Each turn runs ``step_overhead.py`` and ``verify_overhead.py`` of both checkouts, each in a new process, with the packages
of this Python. Other work on the machine only adds time, so that of single steps the 10 % quantile counts, and of all
turns the least.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

QUANTILE = 0.1
SIZES = {1: 12, 16: 10, 64: 6, 256: 4}
"""The rounds of each number of requests, of ``STEPS`` steps each."""
STEPS = 300
VERIFY_ROUNDS = 120


def main() -> None:
    """Compare, and print a line for each kind of step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("checkouts", nargs="*", type=Path, help="two checkouts: before and after")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--measure", choices=("step", "verify"), help="measure the checkout that is imported")
    args = parser.parse_args()
    if args.measure:
        print(json.dumps({"step": decode_steps, "verify": verify_steps}[args.measure]()))
        return
    if len(args.checkouts) != 2:
        parser.error(f"give two checkouts, not {len(args.checkouts)}")
    least: dict[str, list[float]] = {}
    for _ in range(args.turns):
        for arm, root in enumerate(args.checkouts):
            for what in ("step", "verify"):
                for name, value in run(root.resolve(), what).items():
                    row = least.setdefault(name, [float("inf"), float("inf")])
                    row[arm] = min(row[arm], value)
    for name, (before, after) in least.items():
        print(f"{name}: {before:.1f} us before, {after:.1f} us after, ratio {after / before:.3f}")


def run(root: Path, what: str) -> dict[str, float]:
    """Return the microseconds of a checkout, measured in a new process."""
    paths = [root / "benchmarks", root / "core", *sorted((root / "plugins").iterdir())]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(
        [sys.executable, "-P", __file__, "--measure", what], env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{root}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def decode_steps() -> dict[str, float]:
    """Measure decode steps on the engine of ``step_overhead`` that computes nothing."""
    import numpy as np

    from dovetail import LLM, SamplingParams
    from dovetail.messages import AbortAllMsg, GenerateMsg
    from step_overhead import PROMPT_LEN, SPARE_TOKENS, WARM_STEPS, StubEngine

    module = "dovetail.loop.ranks" if find_spec("dovetail.loop.ranks") else "dovetail.loop.loop"  # older commits
    with patch(f"{module}.Engine", StubEngine):
        loop = LLM("tiny", grammar="none", device="cpu", scheduler={"max_running": max(SIZES)}).loop
    params = SamplingParams(temperature=0, max_new_tokens=WARM_STEPS + STEPS + SPARE_TOKENS, ignore_eos=True)
    found = {}
    for count, rounds in SIZES.items():
        took = []
        for _ in range(rounds):
            for i in range(count):
                loop.handle(GenerateMsg(str(i), random.choices(range(16, 4096), k=PROMPT_LEN), params, seed=0))
            while loop.scheduler.waiting or loop.scheduler.prefilling:
                loop.step()
            for step in range(WARM_STEPS + STEPS):
                start = time.perf_counter()
                loop.step()
                if step >= WARM_STEPS:
                    took.append(time.perf_counter() - start)
            loop.handle(AbortAllMsg())
            while loop.has_work:
                loop.step()
        found[f"decode step, {count} requests"] = 1e6 * float(np.quantile(took, QUANTILE))
    return found


def verify_steps() -> dict[str, float]:
    """Measure the steps of ``verify_overhead``."""
    import numpy as np
    import torch

    import verify_overhead
    from dovetail.engine.engine import Engine

    torch.set_num_threads(1)
    bench, wait = verify_overhead.Bench(), Engine.wait

    def seen(engine: Engine, *step: object) -> object:
        bench.seen = time.perf_counter()
        return wait(engine, *step)  # pyright: ignore[reportArgumentType]

    with patch.object(Engine, "wait", seen):
        runs = [bench.run(i) for i in range(VERIFY_ROUNDS + 3)][3:]
    names = "verify step, from its tokens to the next launch", "verify step, of these drafting", "verify step, whole"
    return dict(zip(names, (1e6 * np.quantile(runs, QUANTILE, axis=0)).tolist(), strict=True))


if __name__ == "__main__":
    main()
