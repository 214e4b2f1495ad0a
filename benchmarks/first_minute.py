"""Measure how fast a fresh engine is on a GPU: the first and the second run of workloads, with an empty cache of Triton kernels and
then, in another process, with the cache that the first one has filled.

    python benchmarks/first_minute.py [--model 0.6b] [--rows gsp mixed] [--caches empty filled]

A row says what the engine had prepared when the run began and when it ended (kernels compiled of those noted, graphs captured), for
how long launches waited for compilers, and for how long the host captured graphs. With a filled cache the rows run in the opposite
order.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from dovetail.config import read
from gpubench.models import VARIANTS, variant, write
from gpubench.plan import SIZES, Job


class Prepared(NamedTuple):
    """Count what an engine has prepared, and the seconds that launches have waited and that captures have taken."""

    noted: int
    compiled: int
    graphs: int
    waited: float
    captures: float


def prepared(llm: Any) -> Prepared:
    """Return what the engine of ``llm`` has prepared so far. The seconds are known in this process only."""
    executor = llm.loop.executor
    progress = executor.progress
    rank = getattr(executor, "rank", None)  # of an executor of one rank, which is in this process
    if rank is None:
        return Prepared(progress.kernels, progress.kernels_compiled, progress.graphs_captured, 0.0, 0.0)
    engine = rank.engine
    captures = sum(graphs.seconds for graphs in engine.captures)
    waited = engine.warm_up.wait_seconds
    return Prepared(progress.kernels, progress.kernels_compiled, progress.graphs_captured, waited, captures)


def run(job: Job, rows: list[str]) -> None:
    """Run ``rows`` twice each in this process, which is fresh."""
    from dovetail import SamplingParams
    from gpubench.rows import WORKLOADS
    from gpubench.subject import Subject

    start = time.perf_counter()
    subject = Subject(job.config)
    prompt = job.sizes.prompts("startup", [job.sizes.decode_prompt])[0]
    subject.llm.generate(prompt, SamplingParams(temperature=0.6, max_new_tokens=8, ignore_eos=True, seed=0))
    begun = time.perf_counter()
    print(f"  start {begun - start:.2f} s, from constructing the engine to the first answer", flush=True)
    once = dataclasses.replace(job, repeats=1)
    for row in rows:
        rates = []
        for number in ("first", "second"):
            before, at = prepared(subject.llm), time.perf_counter() - begun
            rates.append(WORKLOADS[row](subject, once)[0].value)
            after, ended = prepared(subject.llm), time.perf_counter() - begun
            print(
                f"  {row:5} {number:6} {rates[-1]:9,.0f} tok/s, from {at:.1f} to {ended:.1f} s; kernels {before.compiled} to "
                f"{after.compiled} of {after.noted}, graphs {before.graphs} to {after.graphs}; launches waited "
                f"{after.waited - before.waited:.2f} s, captures took {after.captures - before.captures:.2f} s",
                flush=True,
            )
        print(f"  {row:5} first / second {rates[0] / rates[1]:.3f}", flush=True)
    subject.llm.close()


def main() -> None:
    """Start a process for each cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("0.6b", "8b", "tiny", *VARIANTS), default="0.6b")
    parser.add_argument("--rows", nargs="*", default=["gsp", "mixed"], choices=["gsp", "mixed", "indep", "chat"])
    parser.add_argument("--caches", nargs="*", default=["empty", "filled"], choices=["empty", "filled"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], dest="sets")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        run(Job(**json.loads(args.job)), args.rows)
        return
    assert args.model in SIZES
    with tempfile.TemporaryDirectory(prefix="dovetail-first-") as folder:
        values = {"model.path": str(write(args.model, Path(folder))), "model.load_format": "dummy"}
        ranks = variant(args.model).ranks
        values |= {"model.dtype": "bfloat16", "device": args.device, **variant(args.model).settings}
        values |= {"parallel.tp": ranks} if ranks > 1 else {}
        config = read((), [*(f"{key}={json.dumps(value)}" for key, value in values.items()), *args.sets], {}).tree
        job = json.dumps(dataclasses.asdict(Job("engine", args.model, config, folder)))
        for cache in args.caches:
            print(f"{args.model}, {cache} cache", flush=True)
            rows = args.rows if cache == "empty" else args.rows[::-1]
            words = [sys.executable, __file__, "--model", args.model, "--job", job, "--rows", *rows]
            subprocess.run(words, env={**os.environ, "TRITON_CACHE_DIR": f"{folder}/triton"}, check=True)


if __name__ == "__main__":
    main()
