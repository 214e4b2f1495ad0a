"""Measure the host work of a decode step without a model: schedule, commit and the rest of the loop, per request.

    .venv/bin/python benchmarks/step_overhead.py --docs docs/benchmarks.md

A real ``Loop`` with its scheduler, page ledger and prefix cache runs on a stand-in engine that returns constant tokens,
so that all measured time is the host's. ``prepare`` is the engine's own host work, the arrays of a step's inputs;
``rest`` is the loop around them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import time
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from dovetail import LLM, Resolved, SamplingParams
from dovetail.engine.captures import Captures
from dovetail.engine.engine import Engine
from dovetail.engine.inputs import Inputs
from dovetail.engine.memory import Needs, budget_for
from dovetail.engine.penalties import TokenCounts
from dovetail.engine.runners import Launched
from dovetail.engine.sampler import Sampler
from dovetail.engine.sharing import NO_SHARING
from dovetail.engine.warmup import WarmUp
from dovetail.interfaces.mesh import Mesh
from dovetail.interfaces.store import StoreContext
from dovetail.loop import Loop
from dovetail.memory.pool import PagedKVPool
from dovetail.messages import AbortAllMsg, GenerateMsg
from dovetail.types import Batch, ForwardOutput, Masks
from peers.report import line, replace_section

PROMPT_LEN = 64
WARM_STEPS = 8
SPARE_TOKENS = 64
"""Output tokens beyond the measured ones: requests admitted early decode while the last prompts enter."""


class StubEngine(Engine):
    """Stand in for the engine of a ``Loop``: inputs are prepared, nothing is computed, and every token is 1."""

    def __init__(self, resolved: Resolved, eos_token_ids: frozenset[int], mesh: Mesh) -> None:
        config = resolved.config
        self.mesh = mesh
        self.info, self.directory = resolved.model_info, resolved.model_dir
        self.device = torch.device("cpu")
        self._local, self._config, self._dtype = self.info, config, torch.float32
        self.context_len = self.info.context_len
        self.page_size = config.memory.page_size
        pages = -(-self.context_len // self.page_size) + 1
        self.num_pages = config.scheduler.rows * pages
        self.pool = PagedKVPool(self.info.cache_groups[0], 2, self.page_size, torch.float32, self.device)  # never read
        self.page_table = np.zeros((1, config.scheduler.rows + 1, pages), np.int32)
        self.inputs = Inputs(self.page_table, self.page_size, self.device)
        self.counts = TokenCounts(config.scheduler.rows + 1, self.info.vocab_size, self.device)
        self.sampler = Sampler(self.info.vocab_size, eos_token_ids, self.device, self.counts)
        self.warm_up = WarmUp(self.device, self.info, mesh)
        self.graphs = None
        self.drafter = self.verify_graphs = self.pieces = self.adapters = None
        self.sharing, self.keeps_all = NO_SHARING, False
        self.model = nn.Module()
        self.stores = resolved.store.build(StoreContext(self.page_size, torch.float32, self.device))
        sizes = [self.stores.page_bytes(group, self.page_size) for group in self.info.cache_groups]
        self.budget = budget_for(config, sizes, self.device, self.context_len, Needs())
        self.prepare_seconds = 0.0
        self._tokens = torch.ones(config.scheduler.rows, 1, dtype=torch.int64)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Launched[Any]:
        start = time.perf_counter()
        self.inputs.prepare(batch)
        self.prepare_seconds += time.perf_counter() - start
        return Launched(cast("Any", None), None, self._tokens[: int(batch.samples.sum())])

    def sample(self, batch: Batch, launched: Launched[Any], masks: Masks | None = None) -> ForwardOutput:
        return ForwardOutput(launched.logits)

    @property
    def captures(self) -> list[Captures[Any]]:
        return []


@dataclasses.dataclass(frozen=True, slots=True)
class Overhead:
    """Hold the microseconds of one decode step, divided by its requests. ``rest`` is the loop around the other
    three."""

    requests: int
    schedule: float
    commit: float
    prepare: float
    rest: float

    @property
    def total(self) -> float:
        return self.schedule + self.commit + self.prepare + self.rest


def main() -> None:
    """Measure each batch size and print a table."""
    args = arguments()
    with patch("dovetail.loop.ranks.Engine", StubEngine):
        llm = LLM("tiny", grammar="none", device="cpu", scheduler={"max_running": max(args.requests)})
    found = [fastest([measure(llm.loop, n, args.steps) for _ in range(args.rounds)]) for n in args.requests]
    Console().print(table(found))
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(o) for o in found], indent=1) + "\n")
    if args.docs:
        replace_section(args.docs, "step_overhead", markdown(found))


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--steps", type=int, default=300, help="decode steps of a round")
    parser.add_argument("--rounds", type=int, default=20, help="the fastest round counts")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--docs", type=Path, help="Markdown file whose section `step_overhead` is replaced")
    return parser.parse_args()


def measure(loop: Loop, requests: int, steps: int) -> Overhead:
    """Decode ``requests`` requests together; steps in which a request starts or ends are not counted."""
    params = SamplingParams(temperature=0, max_new_tokens=WARM_STEPS + steps + SPARE_TOKENS, ignore_eos=True)
    draw = range(16, loop.executor.rank.engine.info.vocab_size)
    for i in range(requests):
        loop.handle(GenerateMsg(str(i), random.choices(draw, k=PROMPT_LEN), params, seed=0))
    while loop.scheduler.waiting or loop.scheduler.prefilling:
        loop.step()
    for _ in range(WARM_STEPS):
        loop.step()
    overhead = timed(loop, requests, steps)
    loop.handle(AbortAllMsg())
    while loop.has_work:
        loop.step()
    return overhead


def timed(loop: Loop, requests: int, steps: int) -> Overhead:
    """Time ``steps`` decode steps of the running requests."""
    engine = loop.executor.rank.engine
    assert isinstance(engine, StubEngine)
    before, prepared = loop.stats(), engine.prepare_seconds
    for _ in range(steps):
        loop.step()
    after = loop.stats()
    assert after.running == requests, f"{after.running} of {requests} requests still run"
    scale = 1e6 / (steps * requests)
    schedule = (after.schedule_seconds - before.schedule_seconds) * scale
    commit = (after.commit_seconds - before.commit_seconds) * scale
    prepare = (engine.prepare_seconds - prepared) * scale
    return Overhead(
        requests=requests,
        schedule=schedule,
        commit=commit,
        prepare=prepare,
        rest=(after.step_seconds - before.step_seconds) * scale - schedule - commit - prepare,
    )


def fastest(rounds: list[Overhead]) -> Overhead:
    """Return the round with the smallest total, which other processes have disturbed least."""
    return min(rounds, key=lambda o: o.total)


def cells(overhead: Overhead) -> list[str]:
    """Return a row of the table."""
    o = overhead
    parts = (o.schedule, o.commit, o.prepare, o.rest, o.total, o.total * o.requests)
    return [str(o.requests), *(f"{part:.2f}" for part in parts)]


HEADER = ["requests", "schedule", "commit", "prepare", "rest", "all, per request", "all, per step"]


def table(found: list[Overhead]) -> Table:
    """Return the table for a terminal."""
    out = Table(title="host time of a decode step, us per request")
    for name in HEADER:
        out.add_column(name, justify="right")
    for overhead in found:
        out.add_row(*cells(overhead))
    return out


def markdown(found: list[Overhead]) -> str:
    """Return the table for docs/benchmarks.md."""
    lines = [line(HEADER), line(["---"] * len(HEADER)), *(line(cells(o)) for o in found)]
    return "Microseconds per request of one decode step.\n\n" + "\n".join(lines)


if __name__ == "__main__":
    main()
