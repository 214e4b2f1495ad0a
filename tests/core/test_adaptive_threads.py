"""Test that an engine on a CPU computes with fewer threads while other processes need the cores, and that it rounds alike with all of them.

Run: python -m pytest -q tests/core/test_adaptive_threads.py
"""

import errno
import os
import resource
import subprocess
import sys
import threading
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail import LLM
from dovetail.engine import adaptive_threads as module
from dovetail.engine.adaptive_threads import (
    FORGOTTEN,
    HELD,
    LONGEST,
    PAUSE,
    WINDOW,
    AdaptiveThreads,
    LinuxCoreTimes,
    ThreadCount,
    adaptive_threads,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def four_threads(set_threads):
    set_threads(4)


def observe(counts, cores, start, seconds, others=0):
    """Let the threads of ``counts`` and ``others`` share ``cores`` equally, as a fair system does. Return the numbers of all windows."""
    seen = []
    for step in range(round(seconds / WINDOW)):
        ready = sum(count.number for count in counts) + others
        waits, idle = max(0.0, 1 - cores / ready), max(0.0, cores - ready)
        waiting = [count.number * waits for count in counts]
        for count, own in zip(counts, waiting, strict=True):
            count.observe(start + step * WINDOW, own, idle)
        seen.append([count.number for count in counts])
    return seen


@given(cores=st.integers(2, 64), engines=st.integers(1, 6), others=st.integers(0, 8))
@settings(max_examples=200, deadline=None)
def test_engines_share_the_cores_and_one_that_is_left_alone_has_them_all(cores, engines, others):
    counts = [ThreadCount(cores) for _ in range(engines)]
    shared = observe(counts, cores, 0.0, 30.0, others)[-200:]
    for numbers in shared:
        used = sum(numbers) + others
        assert used <= max(cores, engines + others) + 2 * engines, "threads wait for cores"
        assert used >= min(cores, engines * cores + others) - engines, "cores are idle"
    changes = sum(one != other for one, other in pairwise(shared))
    assert changes <= 2 * engines * (10.0 / LONGEST + 1), "threads are added again and again in vain"
    assert observe(counts[:1], cores, 30.0, LONGEST + 2.0)[-1] == [cores]


def test_two_engines_on_two_cores_have_one_thread_each_after_one_window():
    counts = [ThreadCount(2), ThreadCount(2)]
    assert observe(counts, 2, 0.0, 5.0) == [[1, 1]] * 100
    assert observe(counts[:1], 2, 5.0, WINDOW) == [[2]], "the core of the other one is used at once"


def test_an_engine_whose_server_takes_some_time_keeps_its_threads():
    count = ThreadCount(2)
    for step in range(100):
        count.observe(step * WINDOW, 0.28, 0.1)
    assert count.number == 2


def test_threads_that_were_added_in_vain_are_tried_again_after_twice_the_time():
    count, tried, now = ThreadCount(2), [], 0.0
    while len(tried) < 9:
        count.observe(now, 0.8, 0.0)
        assert count.number == 1
        while count.number == 1:
            now += WINDOW / 10
            count.observe(now, 0.0, 1.0)
        tried.append(now)
        now += WINDOW
    pauses = [later - earlier - WINDOW for earlier, later in zip([-WINDOW, *tried], tried, strict=False)]
    assert pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 6.4], abs=WINDOW / 5)
    now += HELD  # now they were of use
    count.observe(now, 0.8, 0.0)
    count.observe(now + 0.06, 0.0, 1.0)
    assert count.number == 2


class Times:
    """Pretend the times of a process and its clock."""

    def __init__(self, monkeypatch):
        self.now, self.threads, self.unused = 100.0, {"main": 5.0}, 50.0
        self.unreadable = ()
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))

    def _read(self, name):
        if name in self.unreadable:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def waited(self):
        self._read("waited")
        return dict(self.threads)

    def idle(self):
        self._read("idle")
        return self.unused


def work(context, times, seconds, cores):
    """Work in parts of 0.01 s while ``cores`` are free. Return the number of threads with which the last part was computed."""
    number = 0
    for _ in range(round(seconds / 0.01)):
        with context:
            number = torch.get_num_threads()
            times.now += 0.01
            times.threads["main"] += max(0, number - cores) * 0.01
            times.unused += max(0, cores - number) * 0.01
        assert torch.get_num_threads() == 4
    return number


def test_work_has_the_threads_that_the_times_allow(monkeypatch):
    times = Times(monkeypatch)
    context = AdaptiveThreads(ThreadCount(4), times)
    assert work(context, times, 0.3, cores=4) == 4
    assert work(context, times, 0.07, cores=2) == 2
    assert work(context, times, 0.3, cores=2) == 2, "it adds threads although no core is idle"
    assert work(context, times, 0.3, cores=4) == 4


def test_cores_that_are_idle_because_there_is_no_work_are_not_free(monkeypatch):
    times = Times(monkeypatch)
    context = AdaptiveThreads(ThreadCount(4), times)
    work(context, times, 0.1, cores=2)
    for _ in range(20):
        assert work(context, times, 0.07, cores=2) == 2
        times.now += 2 * PAUSE + WINDOW
        times.unused += 4 * (2 * PAUSE + WINDOW)


def test_work_after_a_second_without_any_begins_with_all_threads(monkeypatch):
    times = Times(monkeypatch)
    context = AdaptiveThreads(ThreadCount(4), times)
    assert work(context, times, 0.3, cores=1) == 1
    times.now += FORGOTTEN - 0.02
    assert work(context, times, 0.01, cores=1) == 1
    times.now += FORGOTTEN + 0.01
    assert work(context, times, 0.01, cores=1) == 4
    assert work(context, times, 0.3, cores=1) == 1


def test_threads_that_start_and_end_count_by_what_they_waited_in_the_window(monkeypatch):
    times = Times(monkeypatch)
    context = AdaptiveThreads(ThreadCount(4), times)
    work(context, times, 0.03, cores=4)
    times.threads = {"main": times.threads["main"], "new": 1000.0}
    assert work(context, times, 0.2, cores=4) == 4
    del times.threads["new"]
    assert work(context, times, 0.2, cores=4) == 4


def test_contexts_may_be_nested_and_the_caller_may_use_fewer_threads(monkeypatch, set_threads):
    times = Times(monkeypatch)
    context = AdaptiveThreads(ThreadCount(4), times)
    work(context, times, 0.1, cores=3)
    with context:
        with context:
            assert torch.get_num_threads() == 3
        assert torch.get_num_threads() == 3
    set_threads(2)
    with context:
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 2


def test_threads_that_begin_meanwhile_have_the_number_of_the_process(monkeypatch):
    """torch gives a thread, when it first computes, the number that was set last in any thread."""
    times, found = Times(monkeypatch), []
    context = AdaptiveThreads(ThreadCount(4), times)
    work(context, times, 0.1, cores=1)
    with context:
        assert torch.get_num_threads() == 1
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
    assert found == [4]


@pytest.mark.parametrize("unreadable", [("waited",), ("idle",), ("waited", "idle")], ids=" ".join)
def test_work_goes_on_with_the_same_threads_while_times_cannot_be_read(unreadable, monkeypatch, caplog):
    times = Times(monkeypatch)
    context = AdaptiveThreads(ThreadCount(4), times)
    assert work(context, times, 0.3, cores=3) == 3
    times.unreadable = unreadable
    times.now += 2 * PAUSE  # a window begins with an error, and the next ones end with one
    for cores in (3, 4):
        assert work(context, times, 0.3, cores=cores) == 3
    assert caplog.text.count("now 3, stays while the times of the cores cannot be read") == 1
    assert "Too many open files" in caplog.text
    times.unreadable = ()
    assert work(context, times, 0.3, cores=4) == 4, "the times can be read again"
    times.unreadable = unreadable
    assert work(context, times, 0.3, cores=4) == 4
    assert len(caplog.records) == 1


def test_the_first_window_may_begin_without_times(monkeypatch):
    times = Times(monkeypatch)
    times.unreadable = ("waited",)
    context = AdaptiveThreads(ThreadCount(4), times)
    assert work(context, times, 0.3, cores=2) == 4
    times.unreadable = ()
    assert work(context, times, 0.3, cores=2) == 2


def test_a_number_that_is_given_is_kept_and_so_are_those_of_ranks_and_gpus(monkeypatch, set_threads):
    monkeypatch.setattr(module, "LinuxCoreTimes", lambda: Times(monkeypatch))
    assert isinstance(adaptive_threads(None, CPU, 1), AdaptiveThreads)
    assert adaptive_threads(4, CPU, 1) is None
    assert adaptive_threads(None, torch.device("cuda", 0), 1) is None
    assert adaptive_threads(None, CPU, 2) is None
    set_threads(1)
    assert adaptive_threads(None, CPU, 1) is None


def test_without_the_times_of_linux_the_number_stays_and_the_log_has_the_reason(monkeypatch, caplog):
    def fail():
        raise OSError("no such file")

    monkeypatch.setattr(module, "LinuxCoreTimes", fail)
    with caplog.at_level("INFO"):
        assert adaptive_threads(None, CPU, 1) is None
    assert "always 4 threads" in caplog.text
    assert "no such file" in caplog.text


def counted():
    try:
        LinuxCoreTimes()
    except OSError:
        return False
    return True


SHARED = """
import multiprocessing, os, time
from dovetail.engine.adaptive_threads import LinuxCoreTimes

def spin(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass

if __name__ == "__main__":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    times = LinuxCoreTimes()
    other = multiprocessing.get_context("fork").Process(target=spin, args=(30,))
    other.start()
    waited, idle = sum(times.waited().values()), times.idle()
    spin(0.5)
    print(sum(times.waited().values()) - waited, times.idle() - idle)
    other.kill()
"""


@pytest.mark.skipif(not counted(), reason="the system does not count how long threads wait for cores")
def test_linux_counts_the_time_for_which_two_processes_wait_for_one_core(tmp_path):
    file = tmp_path / "shared.py"
    file.write_text(SHARED)
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    waited, idle = map(float, done.stdout.split())
    assert waited > 0.1, "two processes have one core, and none waits"
    assert idle < 0.2, "two processes have one core, and it is idle"


@pytest.mark.skipif(not counted(), reason="the system does not count how long threads wait for cores")
def test_a_process_without_free_file_descriptors_computes_on(caplog):
    context = AdaptiveThreads(ThreadCount(4), LinuxCoreTimes())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with context:
            number = torch.get_num_threads()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert number == 4
    assert "Too many open files: '/proc/self/task'" in caplog.text


def record_threads(monkeypatch, engine, name):
    """Return a list that gets the number of threads at each call of the method, by the thread that calls it."""
    numbers, method = [], getattr(engine, name)
    monkeypatch.setattr(engine, name, lambda *given: numbers.append(torch.get_num_threads()) or method(*given))
    return numbers


@pytest.mark.skipif(not counted(), reason="the system does not count how long threads wait for cores")
def test_an_engine_adapts_its_threads_unless_their_number_is_given(monkeypatch):
    with LLM(device="cpu", grammar="none") as llm:
        assert llm.loop.info["threads"] == "4, fewer while other processes need the cores"
        rank = llm.loop.executor.rank
        seen = {name: record_threads(monkeypatch, rank.engine, name) for name in ("launch", "sample", "wait")}
        expected = llm.generate("Once upon a time", {"temperature": 0, "max_new_tokens": 8})
        count = ThreadCount(4)
        for name in ("observe", "forget"):
            monkeypatch.setattr(count, name, lambda *_: None)  # it stays at 1
        count.number = 1
        monkeypatch.setattr(rank.context, "_count", count)
        for numbers in seen.values():
            numbers.clear()
        got = llm.generate("Once upon a time", {"temperature": 0, "max_new_tokens": 8})
        assert got[0].token_ids == expected[0].token_ids
        assert {name: set(numbers) for name, numbers in seen.items()} == {"launch": {1}, "sample": {1}, "wait": {4}}
        assert torch.get_num_threads() == 4
    with LLM(device="cpu", grammar="none", threads=3) as llm:
        assert llm.loop.info["threads"] == "3"
