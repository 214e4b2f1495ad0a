"""The process behind an arm: a loop over JSON lines, idle (blocked in a read) while other arms run.

    -> {"op": "run", "prompts": [[...]], "output_lens": [...]}     <- {"seconds": s, "tokens": [[...]]}
    -> {"op": "profile", "prompts": ..., "output_lens": ...}       <- {"text": "..."}
    -> {"op": "quit"}, or the end of the input                     (ends)

The first line it writes is {"ready": {...versions}}. An error is answered with {"error": "..."}. Standard library only:
each arm runs in its own Python.
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
    """What an arm is told on its command line, as JSON. ``options`` are arguments of the engine's own constructor."""

    model: str
    dtype: str
    threads: int
    options: dict[str, Any] = field(default_factory=dict)


class Runner(Protocol):
    """One engine, warm. ``generate`` returns exactly ``output_lens[i]`` greedy tokens for ``prompts[i]``."""

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]: ...

    def reset(self) -> None:
        """Forget cached prefixes. Not timed."""
        ...

    def profile(self, prompts: list[list[int]], output_lens: list[int]) -> str:
        """Where the time of ``generate`` goes, as text."""
        ...

    def versions(self) -> dict[str, str]: ...


def serve(make: Callable[[Setup], Runner]) -> None:
    """Answer requests until the input ends. Whatever else writes to stdout is sent to stderr."""
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
    # Not all engines end when their last reference goes, and a peer's farewell is not what is measured here.
    sys.stderr.flush()
    os._exit(0)


def answer(runner: Runner, request: dict[str, Any]) -> dict[str, Any]:
    """Do what one request asks."""
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
    """Run on the first ``threads`` CPUs only, so that every arm has the same ones."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
