"""Test the thread that reads files: calls in order, cancelled calls, and calls and an end that wait for no read that hangs.

Run: .venv/bin/python -m pytest -q tests/core/test_read_thread.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from dovetail.engine import read_thread
from dovetail.engine.read_thread import Note, ReadThread

PATIENCE = 60.0


class Image:
    """An object that can be referred to weakly."""


def fail(note: Note) -> None:
    raise ValueError("broken")


def wait(note: Note, begun: threading.Event, gate: threading.Event) -> None:
    begun.set()
    gate.wait(PATIENCE)


def append(note: Note, found: list[object], item: object) -> None:
    found.append(item)


def eventually(check: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not check() and time.monotonic() < deadline:
        time.sleep(0.001)
    return check()


def test_calls_are_made_in_order_and_errors_are_results():
    thread: ReadThread[object] = ReadThread("reads")
    order: list[object] = []
    futures = [thread.submit(append, order, i) for i in range(3)]
    failed, last = thread.submit(fail), thread.submit(lambda note: "last")
    assert last.result(PATIENCE) == "last"
    assert isinstance(failed.exception(), ValueError)
    assert (order, [one.done() for one in futures]) == ([0, 1, 2], [True] * 3)
    thread.close()


def test_a_call_is_cancelled_before_it_has_begun():
    thread: ReadThread[object] = ReadThread("reads")
    begun, gate, called = threading.Event(), threading.Event(), []
    first = thread.submit(wait, begun, gate)
    second, third = thread.submit(append, called, "second"), thread.submit(append, called, "third")
    assert begun.wait(PATIENCE)
    assert (first.cancel(), second.cancel()) == (False, True)
    gate.set()
    third.result(PATIENCE)
    assert called == ["third"]
    thread.close()


def test_a_result_is_kept_by_nothing_but_its_future():
    thread: ReadThread[Image] = ReadThread("reads")
    future, freed = thread.submit(lambda note: Image()), threading.Event()
    weakref.finalize(future.result(PATIENCE), freed.set)
    del future
    assert freed.wait(PATIENCE), "the thread waits for the next call and keeps the result of the last"
    thread.close()


def test_closing_cancels_what_has_not_begun_and_abandons_what_does_not_return(monkeypatch):
    monkeypatch.setattr(read_thread, "CLOSE_SECONDS", 0.01)
    thread: ReadThread[object] = ReadThread("reads")
    begun, gate, called = threading.Event(), threading.Event(), []
    first = thread.submit(wait, begun, gate)
    second = thread.submit(append, called, "second")
    assert begun.wait(PATIENCE)
    thread.close()
    assert not first.done()
    gate.set()
    with pytest.raises(CancelledError):
        second.result(PATIENCE)
    assert not called


@pytest.mark.parametrize("ends", ["with a result", "with an error", "with its next read"])
def test_a_call_that_hangs_is_abandoned_and_its_late_result_is_dropped(monkeypatch, ends):
    monkeypatch.setattr(read_thread, "HUNG_SECONDS", 0.1)
    thread: ReadThread[object] = ReadThread("reads")
    gate, freed, order = threading.Event(), threading.Event(), []

    def hang(note: Note) -> object:
        image = Image()
        weakref.finalize(image, freed.set)
        note(Path("/mnt/config"))
        note(Path("/mnt/tensors"))
        gate.wait(PATIENCE)
        if ends == "with its next read":
            note(Path("/mnt/tensors"))
            order.append("went on")
        if ends == "with an error":
            raise ValueError("late")
        return image

    hung, second = thread.submit(hang), thread.submit(append, order, "second")
    old = thread._thread
    assert eventually(lambda: (thread.end_if_hung(hung), hung.done())[1])
    assert str(hung.exception()).startswith("/mnt/tensors has not responded for 0.1 seconds; check its file system")
    second.result(PATIENCE)
    thread.submit(append, order, "third").result(PATIENCE)
    assert not freed.is_set()
    gate.set()
    assert old is not None
    old.join(PATIENCE)
    assert not old.is_alive(), "two threads make calls"
    assert freed.is_set()
    assert order == ["second", "third"]
    thread.close()


def test_a_slow_call_is_not_abandoned(monkeypatch):
    """It makes progress, or waits for another call."""
    monkeypatch.setattr(read_thread, "HUNG_SECONDS", 0.5)
    thread: ReadThread[object] = ReadThread("reads")

    def read_slowly(note: Note) -> str:
        for i in range(20):
            note(Path(f"/mnt/{i}"))
            time.sleep(0.05)
        return "read"

    reads = [thread.submit(read_slowly) for _ in range(2)]
    while not all(read.done() for read in reads):
        for read in reads:
            thread.end_if_hung(read)
        time.sleep(0.001)
    assert [read.result() for read in reads] == ["read", "read"]
    thread.close()


@pytest.mark.parametrize("call", ["fifo.read_bytes()", "stored_tensors(fifo)"])
def test_a_process_ends_while_a_read_hangs(tmp_path: Path, call):
    """The read does not hold the GIL either."""
    os.mkfifo(tmp_path / "fifo")
    program = (
        "import os, sys; from pathlib import Path; from dovetail.engine.read_thread import ReadThread\n"
        "from dovetail.engine.shards import stored_tensors; fifo = Path(sys.argv[1])\n"
        f"thread = ReadThread('reads'); thread.submit(lambda note: {call})\n"
        "writer = os.open(fifo, os.O_WRONLY)  # opened once the read has begun, and never closed\n"
        "thread.close(); print('closed')\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "fifo")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr
