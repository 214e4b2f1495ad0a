"""Run a worker process: it performs its tasks and reports each on its standard output, as lines of JSON.

It ends at the first task that fails, because the device may be lost; ``supervise`` starts another process for the
remaining tasks.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, TextIO

from gpubench.models import variant
from gpubench.plan import Job

Handler = Callable[[str], Any]


def main() -> None:
    """Run ``python -m gpubench.worker JOB TASKS``."""
    channel = claim_stdout()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    job, tasks = Job(**json.loads(sys.argv[1])), json.loads(sys.argv[2])
    send(channel, {"begin": "start"})
    task = "start"
    try:
        if routing := variant(job.model).routing:
            from gpubench.routing import replace_routing

            replace_routing(routing)
        handle, facts = HANDLERS[job.kind](job)
        send(channel, {"done": "start", "result": facts})
        for task in tasks:
            send(channel, {"begin": task})
            start = time.perf_counter()
            result = handle(task)
            send(channel, {"done": task, "result": result, "took": time.perf_counter() - start})
    except Exception as error:
        traceback.print_exc()
        send(channel, {"failed": task, "error": f"{type(error).__name__}: {error}"})
        sys.exit(1)


def claim_stdout() -> TextIO:
    """Reserve the standard output for this protocol: other output goes to standard error."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return channel


def send(channel: TextIO, message: dict[str, Any]) -> None:
    """Write one line."""
    channel.write(json.dumps(message, default=dataclasses.asdict) + "\n")
    channel.flush()


def engine(job: Job) -> tuple[Handler, dict[str, Any]]:
    """Run workloads and breakdowns on one engine."""
    from gpubench.breakdown import breakdown
    from gpubench.rows import CASES, WORKLOADS
    from gpubench.subject import Subject

    start = time.perf_counter()
    subject = Subject(job.config)
    seconds = time.perf_counter() - start
    facts = {"seconds": seconds, "rest": subject.rest(), "versions": versions(), "engine": subject.llm.loop.info}

    def handle(task: str) -> Any:
        row, _, case = task.partition(":")
        if row == "breakdown":
            return breakdown(subject, job, int(case))
        return CASES[row](subject, job, int(case)) if case else WORKLOADS[row](subject, job)

    return handle, facts


def check(job: Job) -> tuple[Handler, dict[str, Any]]:
    """Check the correctness of attention backends."""
    from gpubench.correctness import Checker

    checker = Checker(job)
    return checker.check, {}


def startup(job: Job) -> tuple[Handler, dict[str, Any]]:
    """Measure the time from constructing the engine to its first answer, including imports in between."""
    import dovetail

    def handle(task: str) -> Any:
        sizes = job.sizes
        prompt = sizes.prompts("startup", [sizes.decode_prompt])[0]
        start = time.perf_counter()
        llm = dovetail.LLM(**job.config)
        built = time.perf_counter() - start
        llm.generate(prompt, dovetail.SamplingParams(temperature=0.6, max_new_tokens=8, ignore_eos=True, seed=0))
        return {"seconds": time.perf_counter() - start, "constructor": built}

    return handle, {}


def versions() -> dict[str, str]:
    """Return the versions on which the numbers depend."""
    import torch

    import dovetail

    cuda = torch.cuda.is_available()
    return {
        "dovetail": dovetail.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
    }


def structured(job: Job) -> tuple[Handler, dict[str, Any]]:
    """Measure decode with a grammar."""
    from gpubench.structured import structured as handler

    return handler(job)


HANDLERS: dict[str, Callable[[Job], tuple[Handler, dict[str, Any]]]] = {
    "engine": engine,
    "check": check,
    "startup": startup,
    "json": structured,
}

if __name__ == "__main__":
    main()
