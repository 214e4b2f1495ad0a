"""Test the thread that reads files: calls in order, cancelled calls, and an end that waits for no read.

Run: .venv/bin/python -m pytest -q tests/core/test_read_thread.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from dovetail.engine import read_thread
from dovetail.engine.read_thread import ReadThread

PATIENCE = 60.0


class Image:
    """An object that can be referred to weakly."""


def fail() -> None:
    raise ValueError("broken")


def test_calls_are_made_in_order_and_errors_are_results():
    thread: ReadThread[object] = ReadThread("reads")
    order: list[int] = []
    futures = [thread.submit(order.append, i) for i in range(3)]
    failed, last = thread.submit(fail), thread.submit(lambda: "last")
    assert last.result(PATIENCE) == "last"
    assert isinstance(failed.exception(), ValueError)
    assert (order, [one.done() for one in futures]) == ([0, 1, 2], [True] * 3)
    thread.close()


def test_a_call_is_cancelled_before_it_has_begun():
    thread: ReadThread[object] = ReadThread("reads")
    begun, gate, called = threading.Event(), threading.Event(), []
    first = thread.submit(lambda: (begun.set(), gate.wait(PATIENCE)))
    second, third = thread.submit(called.append, "second"), thread.submit(called.append, "third")
    assert begun.wait(PATIENCE)
    assert (first.cancel(), second.cancel()) == (False, True)
    gate.set()
    third.result(PATIENCE)
    assert called == ["third"]
    thread.close()


def test_a_result_is_kept_by_nothing_but_its_future():
    thread: ReadThread[Image] = ReadThread("reads")
    future, freed = thread.submit(Image), threading.Event()
    weakref.finalize(future.result(PATIENCE), freed.set)
    del future
    assert freed.wait(PATIENCE), "the thread waits for the next call and keeps the result of the last"
    thread.close()


def test_closing_cancels_what_has_not_begun_and_abandons_what_does_not_return(monkeypatch):
    monkeypatch.setattr(read_thread, "CLOSE_SECONDS", 0.01)
    thread: ReadThread[object] = ReadThread("reads")
    begun, gate, called = threading.Event(), threading.Event(), []
    first = thread.submit(lambda: (begun.set(), gate.wait(PATIENCE)))
    second = thread.submit(called.append, "second")
    assert begun.wait(PATIENCE)
    thread.close()
    assert not first.done()
    gate.set()
    with pytest.raises(CancelledError):
        second.result(PATIENCE)
    assert not called


def test_a_process_ends_while_a_read_hangs(tmp_path: Path):
    os.mkfifo(tmp_path / "fifo")
    program = (
        "import os, sys; from pathlib import Path; from dovetail.engine.read_thread import ReadThread; fifo = Path(sys.argv[1])\n"
        "thread = ReadThread('reads'); thread.submit(fifo.read_bytes)\n"
        "writer = os.open(fifo, os.O_WRONLY)  # opened once the read has begun, and never closed\n"
        "thread.close(); print('closed')\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "fifo")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr
