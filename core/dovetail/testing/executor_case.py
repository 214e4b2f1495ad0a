"""Start the executors that a test drives."""

from __future__ import annotations

import os
import select
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import msgspec

from dovetail.interfaces.executor import Executor, ExecutorContext
from dovetail.interfaces.features import Feature
from dovetail.registry.specs import ComponentKind
from dovetail.testing.component import ComponentSuite
from dovetail.testing.executor_ranks import TARGET, PretendedRank, RankFault, RankScript, build
from dovetail.testing.executor_runs import ExecutorRun, within
from dovetail.testing.executor_traffic import PlanTraffic


class ExecutorCase(ComponentSuite):
    """Start executors whose ranks are ``PretendedRank``, in this process and in another one."""

    kind: ClassVar[ComponentKind] = ComponentKind.EXECUTOR
    deadline_seconds: ClassVar[float] = 5.0

    def make(self, context: ExecutorContext) -> Executor:
        """Return a new executor. Override this method to test a class that no plugin registers."""
        return self.build(context)

    def start(self, script: RankScript, size: int) -> Executor:
        """Return an executor of ``size`` ranks that behave as ``script`` describes."""
        if size > 1:
            self.require(Feature.EXECUTOR_RANKS)
        description = msgspec.json.encode(script)

        def build_rank(rank: int, size: int, rendezvous: str) -> PretendedRank:
            return build(description, rank, size, rendezvous)

        return self.make(ExecutorContext(size, build_rank, TARGET, description))

    @contextmanager
    def open(self, script: RankScript, size: int = 1) -> Iterator[Executor]:
        """Start an executor, and close it at the end."""
        executor = self.start(script, size)
        try:
            yield executor
        finally:
            within(self.patience, executor.close)

    @contextmanager
    def drive(self, script: RankScript, size: int = 1, *, seed: int = 0, max_prompt: int = 60) -> Iterator[ExecutorRun]:
        """Start an executor, and return what drives it. Close it at the end."""
        with self.open(script, size) as executor:
            traffic = PlanTraffic(seed, executor.page_table, script.draft_width, max_prompt)
            yield ExecutorRun(executor, script, traffic)

    @property
    def patience(self) -> float:
        """Return the seconds within which every call returns or raises."""
        return 2 * self.deadline_seconds + 5

    def start_in_another_process(self, busy: bool) -> tuple[int, list[int]]:
        """Fork, and start an executor in the child, which then waits, or with ``busy`` makes a step that hangs. Return the
        child's and the ranks' process ids."""
        read, write = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the other threads of this process have no part in what the child does
            parent = os.fork()
        if not parent:
            try:
                os.setpgid(0, 0)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                script = RankScript(faults=[RankFault("launch", "hang", number=1)])
                executor = self.start(script, 2)
                os.write(write, " ".join(str(entry["pid"]) for entry in executor.describe()["ranks"]).encode())
                if busy:
                    plan = PlanTraffic(0, executor.page_table).plan()
                    executor.launch(plan)
                    executor.wait(plan)
                time.sleep(60)
            finally:
                os._exit(1)
        os.close(write)
        with os.fdopen(read) as pipe:
            assert select.select([pipe], [], [], 60)[0], "the executor does not start in another process"
            pids = [int(word) for word in os.read(pipe.fileno(), 1000).split()]
        assert len(pids) == 2
        time.sleep(0.3 if busy else 0)
        return parent, pids
