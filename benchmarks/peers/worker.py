"""Run the process of an arm: a loop over JSON lines, idle (blocked in a read) while other arms run.

    -> {"op": "run", "prompts": [[...]], "output_lens": [...]}     <- {"seconds": s, "tokens": [[...]]}
    -> {"op": "profile", "prompts": ..., "output_lens": ...}       <- {"text": "..."}
    -> {"op": "quit"}, or the end of the input                     (ends)

The first line that it writes is {"ready": {...versions}}. An error is answered with {"error": "..."}. It uses the
standard library only, because each arm runs in its own Python.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO


@dataclass(frozen=True, slots=True)
class Setup:
    """Describe an arm, as given on its command line in JSON. ``options`` are arguments of the engine's own
    constructor."""

    model: str
    dtype: str
    threads: int
    options: dict[str, Any] = field(default_factory=dict)


class Runner(Protocol):
    """Hold one warm engine. ``generate`` returns exactly ``output_lens[i]`` greedy tokens for ``prompts[i]``."""

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]: ...

    def reset(self) -> None:
        """Remove cached prefixes. Not timed."""
        ...

    def profile(self, prompts: list[list[int]], output_lens: list[int]) -> str:
        """Return how the time of ``generate`` is spent, as text."""
        ...

    def versions(self) -> dict[str, str]: ...


def serve(make: Callable[[Setup], Runner]) -> None:
    """Answer requests until the input ends. Other output to stdout is redirected to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    setup = Setup(**json.loads(sys.argv[1]))
    pin(setup.threads)
    runner = make(setup)
    send(answers, {"ready": runner.versions()})
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "quit":
            break
        send(answers, answer(runner, request))
    answers.close()
    # Not all engines end with their last reference, and the shutdown of a peer is not measured here.
    sys.stderr.flush()
    os._exit(0)


def answer(runner: Runner, request: dict[str, Any]) -> dict[str, Any]:
    """Perform one request."""
    prompts, lens = request["prompts"], request["output_lens"]
    try:
        runner.reset()
        if request["op"] == "profile":
            return {"text": runner.profile(prompts, lens)}
        start = time.perf_counter()
        tokens = runner.generate(prompts, lens)
        seconds = time.perf_counter() - start
    except Exception:
        return {"error": traceback.format_exc()}
    if [len(row) for row in tokens] != lens:
        return {"error": f"output lengths are {[len(row) for row in tokens]}, asked for {lens}"}
    return {"seconds": seconds, "tokens": tokens}


def send(stream: TextIO, message: dict[str, Any]) -> None:
    """Write one line."""
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def pin(threads: int) -> None:
    """Run on the first ``threads`` CPUs only, so that every arm uses the same CPUs."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
