"""Drive an executor and a reference with the same plans, and see what processes leave behind."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest

from dovetail.interfaces.executor import Executor
from dovetail.testing.executor_ranks import PretendedRank, RankScript, show
from dovetail.testing.executor_traffic import PlanTraffic
from dovetail.types import StepPlan, StepResult

T = TypeVar("T")
STEPS = 40


class ExecutorRun:
    """Drive an executor with plans, and a ``PretendedRank`` directly with the same ones. Compares their results."""

    def __init__(self, executor: Executor, script: RankScript, traffic: PlanTraffic) -> None:
        self.executor, self.traffic = executor, traffic
        self.reference = PretendedRank(msgspec.structs.replace(script, faults=[]))

    def step(self) -> None:
        """Make a step, which is committed before the next one."""
        plan = self.schedule()
        self.launch(plan)
        self.sample(plan)
        self.commit(plan)

    def schedule(self) -> StepPlan:
        """Return the next plan, with drafts if there are any."""
        plan = self.traffic.plan()
        departed = self.traffic.take_departed()
        if not self.traffic.draft_width:
            return plan
        if departed:
            self.executor.forget(departed)
            self.reference.forget(departed)
        tree, expected = self.executor.propose(plan), self.reference.propose(plan)
        assert show(tree) == show(expected), f"other drafts for plan {plan.number}"
        self.traffic.attach(plan, expected)
        return plan

    def launch(self, plan: StepPlan) -> None:
        """Launch a step."""
        self.executor.launch(plan)
        self.reference.launch(plan)

    def sample(self, plan: StepPlan) -> None:
        """Sample a step, with masks if it is constrained."""
        masks = self.traffic.masks(plan, self.executor.mask_buffer) if plan.constrained else None
        self.executor.sample(plan, masks)
        if masks is not None:
            self.reference.register_masks(masks.bits.view(np.uint8))
        self.reference.sample(plan, masks)

    def commit(self, plan: StepPlan) -> None:
        """Compare the results of a step, and commit it."""
        result = self.executor.wait(plan)
        expected = self.reference.wait(plan)
        assert show_result(result) == show_result(expected), f"another result for plan {plan.number}"
        committed = self.traffic.commit(plan, result)
        if self.traffic.draft_width:
            self.executor.observe(plan, committed)
            self.reference.observe(plan, committed)

    def run(self, steps: int = STEPS) -> None:
        """Make steps one after the other."""
        for _ in range(steps):
            self.step()

    def run_overlapped(self, steps: int = STEPS) -> None:
        """Launch every step before the one before it is committed."""
        previous: StepPlan | None = None
        for _ in range(steps):
            plan = self.schedule()
            self.launch(plan)
            if previous is not None:
                self.commit(previous)
            self.sample(plan)
            previous = plan
        assert previous is not None
        self.commit(previous)

    def compare_journals(self) -> None:
        """Check that every rank has seen exactly what the reference has."""
        for name in ("journal", "samples"):
            expected = msgspec.to_builtins([list(entry) for entry in getattr(self.reference, name)])
            for rank, journal in enumerate(self.executor.call(name)):
                compare_journal(rank, msgspec.to_builtins(journal), expected)


def compare_journal(rank: int, journal: Sequence[Any], expected: Sequence[Any]) -> None:
    """Check a journal call by call, and field by field."""
    for entry, (verb, number, parts) in zip(journal, expected, strict=False):
        assert [entry[0], entry[1]] == [verb, number], f"rank {rank} got {entry[:2]} in place of {[verb, number]}"
        for name, text in parts.items():
            assert entry[2][name] == text, f"rank {rank}: {name} of {verb} {number}"
    assert len(journal) == len(expected), f"rank {rank} got {len(journal)} calls; expected: {len(expected)}"


def show_result(result: StepResult) -> str:
    """Return a text that differs for results that differ in any bit."""
    assert isinstance(result, StepResult)
    return show(tuple(result))


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return ``call()``, and fail if it takes longer than ``seconds``. It runs on a thread."""
    found: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        pytest.fail(f"it has not returned within {seconds:g} s")
    if raised:
        raise raised[0]
    return found[0]


def has_ended(pid: int) -> bool:
    """Return True if there is no process ``pid``, or if only its exit status is left."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return text.rpartition(")")[2].split()[0] in "ZX"


def interrupted(call: Callable[[], object], calls: int) -> bool:
    """Run ``call``, and raise ``KeyboardInterrupt`` in this thread at its ``calls``-th call of a function: where a Python
    function begins or a C function has returned, as Ctrl-C does. Return False if it makes fewer calls.

    Calls that the standard library makes are not counted: an interrupt in ``threading.Condition`` or
    ``concurrent.futures`` can leave a lock of theirs held for ever, which their user cannot mend."""
    left = calls

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal left
        caller = frame.f_back if event == "call" else frame
        if event not in ("call", "c_return") or caller is None:
            return
        if caller.f_globals.get("__name__", "").partition(".")[0] not in sys.stdlib_module_names:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    sys.setprofile(count)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def await_true(what: Callable[[], bool], seconds: float) -> bool:
    """Return True as soon as ``what`` does, and False if it has not within ``seconds``."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@contextmanager
def private_temp() -> Iterator[str]:
    """Let temporary files of this process be in a new folder, and return it."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        try:
            yield folder
        finally:
            tempfile.tempdir = before


def open_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def unused_shared_memory() -> set[str]:
    """Return the names of shared memory that no process has mapped."""
    names = set(os.listdir("/dev/shm"))
    for process in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            text = process.read_text()
            names = {name for name in names if f"/dev/shm/{name}" not in text}
    return names
