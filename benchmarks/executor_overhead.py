"""Measure what an executor adds to a decode step: the host's time to send a plan and to read a result, and the time of a
round trip to ranks that compute nothing.

    .venv/bin/python benchmarks/executor_overhead.py --rows 64 --ranks 2

``pack`` and ``unpack`` are the two sides of one message without its transport. ``launch`` and ``wait`` are the calls of
the executor; a ``wait`` includes the time until the rank has answered.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from dovetail.interfaces.executor import Executor, ExecutorContext, ExecutorInfo, RankEngine, WarmUpProgress
from dovetail.sampling_params import SamplingParams
from dovetail.types import (
    AdmittedRequest,
    Committed,
    DraftTree,
    IntArray,
    Masks,
    PageUpdates,
    StepPlan,
    StepResult,
)
from dovetail_executors.config import LocalConfig, WorkersConfig
from dovetail_executors.local import Local
from dovetail_executors.workers.executor import Workers
from dovetail_executors.workers.memory import AnonymousMemory
from dovetail_executors.workers.wire import PlanReceiver, PlanSender, ReplyReceiver, ReplySender

SLOTS, PAGES = 600, 64


class IdleRank(RankEngine):
    """Answer every step at once with the same tokens."""

    def __init__(self) -> None:
        self._table = np.zeros((1, SLOTS, PAGES), np.int32)

    @property
    def info(self) -> ExecutorInfo:
        """See ``RankEngine``."""
        return ExecutorInfo(4096, 16, 10_000, False, 4)

    @property
    def progress(self) -> WarmUpProgress:
        """See ``RankEngine``."""
        return WarmUpProgress()

    @property
    def page_table(self) -> IntArray:
        """See ``RankEngine``."""
        return self._table

    def launch(self, plan: StepPlan) -> None:
        """See ``RankEngine``."""

    def sample(self, plan: StepPlan, masks: Masks | None) -> None:
        """See ``RankEngine``."""

    def ready(self, plan: StepPlan) -> bool:
        """See ``RankEngine``."""
        return True

    def wait(self, plan: StepPlan) -> StepResult:
        """See ``RankEngine``."""
        return StepResult(np.ones((len(plan.slots), 1), np.int64))

    def mask_buffer(self, rows: int, width: int) -> IntArray:
        """See ``RankEngine``."""
        return np.empty((rows, width), np.int32)

    def propose(self, plan: StepPlan) -> DraftTree | None:
        """See ``RankEngine``."""

    def observe(self, plan: StepPlan, committed: Committed) -> None:
        """See ``RankEngine``."""

    def forget(self, departed: object) -> None:
        """See ``RankEngine``."""

    def locate_updates(self, updates: PageUpdates) -> None:
        """See ``RankEngine``."""

    def idle(self) -> bool:
        """See ``RankEngine``."""
        return False

    def lost(self, error: BaseException) -> str | None:
        """See ``RankEngine``."""

    def describe(self) -> dict[str, object]:
        """See ``RankEngine``."""
        return {}

    def close(self) -> None:
        """See ``RankEngine``."""


def build(description: bytes, rank: int, size: int, rendezvous: str) -> IdleRank:
    """Build a rank in its process."""
    return IdleRank()


class Plans:
    """Make decode plans of ``rows`` requests, each of which gets a page in one of 16 steps. With ``drafts``, every row has
    4 drafts."""

    def __init__(self, rows: int, *, drafts: bool = False) -> None:
        self.rows, self.drafts, self.number = rows, drafts, 0
        self.slots = np.arange(1, rows + 1, dtype=np.int32)
        self.texts = [np.zeros(100_000, np.int32) for _ in range(rows)]
        self.lens = np.full(rows, 100, np.int32)

    def next(self) -> StepPlan:
        """Return the next plan. The first one admits the requests."""
        self.number += 1
        rows, ones = self.rows, np.ones(self.rows, np.int32)
        admitted = ()
        if self.number == 1:
            params = SamplingParams(temperature=0.7, top_p=0.9)
            admitted = tuple(AdmittedRequest(i + 1, i, params, i, 100, self.texts[i], 100) for i in range(rows))
        new = np.flatnonzero((self.lens + np.arange(rows)) % 16 == 0).astype(np.int32)
        updates = PageUpdates(self.slots[new], new, new[None], self.number)
        drafts = None
        if self.drafts:
            tokens = np.ones((rows, 4), np.int32)
            drafts = DraftTree.chains(tokens, np.full(rows, 4, np.int32))
        self.lens = self.lens + ones
        return StepPlan(
            self.number,
            0,
            self.slots,
            self.lens - ones,
            ones * 5 if drafts else ones,
            np.ones(rows, np.bool_),
            updates,
            np.zeros(0, np.int32),
            admitted,
            rows_version=1,
            draft_limits=np.full(rows, 4, np.int32) if self.drafts else None,
            drafts=drafts,
        )


def median(call: Callable[[], float], repeats: int) -> float:
    """Return the median of what ``call`` measures, in microseconds."""
    return 1e6 * statistics.median(call() for _ in range(repeats))


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure_packing(rows: int, repeats: int, *, drafts: bool) -> dict[str, float]:
    """Return the microseconds of packing and unpacking a plan and a result."""
    packed: list[bytearray] = []
    plans, sender = Plans(rows, drafts=drafts), PlanSender(lambda: len(packed), drafts=drafts)
    receiver = PlanReceiver(AnonymousMemory.create(4096), drafts=drafts)
    pack, unpack = [], []
    for _ in range(repeats):
        plan = plans.next()
        pack.append(timed(lambda plan=plan: packed.append(bytearray(sender.plan(plan)))))
        unpack.append(timed(lambda: receiver.plan(packed[-1])))
    width = 5 if drafts else 1
    tokens = np.ones((rows, width), np.int64)
    result = StepResult(tokens, np.ones(rows, np.int64), tokens) if drafts else StepResult(tokens)
    replies, reader = ReplySender(), ReplyReceiver()
    data = bytearray(replies.result(1, result))
    return {
        "plan: pack": 1e6 * statistics.median(pack),
        "plan: unpack": 1e6 * statistics.median(unpack),
        "result: pack": median(lambda: timed(lambda: replies.result(1, result)), repeats),
        "result: unpack": median(lambda: timed(lambda: reader.result(data)), repeats),
    }


def measure_calls(executor: Executor, rows: int, repeats: int) -> dict[str, float]:
    """Return the microseconds of the calls of a step."""
    plans = Plans(rows)
    times: dict[str, list[float]] = {"launch": [], "sample": [], "wait": []}
    for _ in range(repeats):
        plan = plans.next()
        times["launch"].append(timed(lambda plan=plan: executor.launch(plan)))
        times["sample"].append(timed(lambda plan=plan: executor.sample(plan, None)))
        times["wait"].append(timed(lambda plan=plan: executor.wait(plan)))
    return {name: 1e6 * statistics.median(found) for name, found in times.items()}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--spin-ms", type=float, default=10.0)
    given = parser.parse_args()
    columns: dict[str, dict[str, float]] = {}
    context = ExecutorContext(
        given.ranks, lambda rank, size, rendezvous: IdleRank(), f"{Path(__file__).stem}:build", b""
    )
    for rows in given.rows:
        found = measure_packing(rows, given.repeats, drafts=False)
        found |= {f"{n}, drafts": us for n, us in measure_packing(rows, given.repeats, drafts=True).items()}
        local = Local(LocalConfig(), replace(context, size=1))
        found |= {f"local: {name}": us for name, us in measure_calls(local, rows, given.repeats).items()}
        workers = Workers(WorkersConfig(spin_ms=given.spin_ms), context)
        found |= {f"workers: {name}": us for name, us in measure_calls(workers, rows, given.repeats).items()}
        workers.close()
        columns[f"{rows} rows"] = found
    table = Table("us, median", *columns)
    for name in next(iter(columns.values())):
        table.add_row(name, *(f"{found[name]:.1f}" for found in columns.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
