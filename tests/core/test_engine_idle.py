"""Test what the engine process and the thread of an engine do while there is no request.

.venv/bin/python -m pytest -q tests/core/test_engine_idle.py
"""

import itertools
import threading
import time
from types import SimpleNamespace

import pytest
import zmq

from dovetail.errors import EngineDeadError
from dovetail.interfaces.executor import WarmUpProgress
from dovetail.lang.backends import engine_thread
from dovetail.lang.backends.engine_thread import EngineThread
from dovetail.loop import Loop
from dovetail.server import engine_process


def test_the_engine_process_works_until_nothing_is_left_and_then_checks_the_engine_now_and_then(monkeypatch):
    """``idle`` is called without a pause while there is work, and later often enough that a lost rank is noticed."""
    monkeypatch.setattr(engine_process, "_IDLE_CHECK_MS", 20)
    context = zmq.Context()
    inbox, sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.bind("inproc://inbox")
    sender.connect("inproc://inbox")
    calls = []

    def idle():
        calls.append(time.monotonic())
        if len(calls) == 9:
            sender.send(b"message")
        return len(calls) < 5

    engine_process._await_message(SimpleNamespace(idle=idle), inbox)
    gaps = [after - before for before, after in itertools.pairwise(calls)]
    assert len(gaps) == 8
    assert all(gap > 0.015 for gap in gaps[4:])
    assert inbox.recv() == b"message"

    def lost():
        raise EngineDeadError("the device was lost: rank 1")

    with pytest.raises(EngineDeadError, match="rank 1"):
        engine_process._await_message(SimpleNamespace(idle=lost), inbox)
    context.destroy(linger=0)


def test_the_thread_of_an_engine_notices_a_lost_rank_without_a_request(monkeypatch):
    monkeypatch.setattr(engine_thread, "_IDLE_CHECK_SECONDS", 0.02)
    calls, lost = [], threading.Event()

    def idle():
        calls.append(None)
        if lost.is_set():
            raise EngineDeadError("the device was lost: rank 1")
        return False

    thread = EngineThread(SimpleNamespace(idle=idle, has_work=False, scheduler=None, dead="rank 1"), None)
    while len(calls) < 3:
        time.sleep(0.01)
    lost.set()
    thread._thread.join(10)
    assert not thread._thread.is_alive()
    assert "rank 1" in str(thread._refusal)


@pytest.mark.parametrize("paused", [False, True])
def test_idle_work_is_finished_when_the_kernels_are_compiled_and_every_graph_is_captured(paused):
    """A measurement must not begin while ``idle`` waits for kernels."""
    states = [
        WarmUpProgress(2, 0, 0, 1),
        WarmUpProgress(2, 1, 0, 1),
        WarmUpProgress(2, 2, 0, 1),
        WarmUpProgress(2, 2, 1),
    ]
    executor, works = SimpleNamespace(progress=states[0]), iter([False, False, True, False])

    def idle():
        if paused:
            return False
        executor.progress = states.pop(0)
        return next(works)

    loop = SimpleNamespace(idle=idle, executor=executor, _verbs=SimpleNamespace(paused=paused))
    Loop.finish_idle_work(loop)
    assert executor.progress.done != paused
    assert next(works, None) is (False if paused else None)
