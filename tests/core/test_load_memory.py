"""Test how benchmarks/load_apis.py watches the memory of a server's processes.

Run: python -m pytest tests/core/test_load_memory.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dovetail.bench.machine import process_tree

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from load_memory import MOST_GROWTH_MIB, Memory, growth

sys.path.pop(0)


def watched(**processes: list[float]) -> Memory:
    memory = Memory()
    for values in zip(*processes.values(), strict=True):
        memory.add({name: mib for name, mib in zip(processes, values, strict=True) if mib})
    return memory


def test_memory_that_stands_still_is_no_fault() -> None:
    assert not watched(server=[100.0] * 30, engine=[10.0] * 10 + [500.0] * 20).faults()


def test_growth_is_that_of_the_last_third() -> None:
    assert growth([0.0] * 10 + [100.0] * 20) == 0
    assert growth([100.0] * 20 + [130.0] * 10) == 30


def test_what_is_given_back_and_taken_again_is_no_growth() -> None:
    engine = [830.0] * 10 + [800.0] * 10 + [830.0] * 10
    assert not watched(server=[100.0] * 30, engine=engine).faults()
    assert watched(engine=[value + 2.0 * i for i, value in enumerate(engine)]).faults()


def test_a_process_that_shrinks_does_not_hide_one_that_grows() -> None:
    much = 2 * MOST_GROWTH_MIB
    faults = watched(server=[100.0 + much] * 20 + [100.0] * 10, engine=[500.0] * 20 + [500.0 + much] * 10).faults()
    assert len(faults) == 1
    assert "engine" in faults[0]


def test_many_processes_that_grow_a_little_grow_together() -> None:
    little = MOST_GROWTH_MIB * 0.75
    each = [50.0] * 20 + [50.0 + little] * 10
    faults = watched(one=each, other=each).faults()
    assert len(faults) == 1
    assert "together" in faults[0]


def test_a_process_that_starts_late_is_growth() -> None:
    memory = watched(server=[100.0] * 30, worker=[0.0] * 20 + [200.0] * 10)
    assert len(memory.faults()) == 2
    assert memory.report()["worker"] == {"first": 0.0, "last": 200.0, "most": 200.0, "growth": 200.0}


def test_too_few_looks_are_a_fault() -> None:
    assert Memory().faults()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="this system has no /proc")
def test_a_child_that_a_thread_has_started_is_of_the_family() -> None:
    started: list[subprocess.Popen[bytes]] = []
    up, done = threading.Event(), threading.Event()

    def work() -> None:
        started.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        up.set()
        done.wait()

    thread = threading.Thread(target=work)
    thread.start()
    up.wait()
    try:
        assert started[0].pid in process_tree(os.getpid())
    finally:
        done.set()
        thread.join()
        started[0].communicate(b"\n")
