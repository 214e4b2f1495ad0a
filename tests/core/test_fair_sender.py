"""Test how requests are sent to an engine: in turns for tenants, a limited number of each at a time.

Run: .venv/bin/python -m pytest -q -p no:xdist tests/core/test_fair_sender.py
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dovetail.errors import QueueFullError
from dovetail.messages import GenerateMsg
from dovetail.sampling_params import SamplingParams
from dovetail.server.fair_sender import AT_ONCE, AT_ONCE_SHARED, PAUSE_SECONDS, SHARED_SECONDS, FairSender


def message(rid: str, tenant: str, priority: int = 0, weight: float = 1.0, adapter: str = "") -> GenerateMsg:
    return GenerateMsg(
        rid, [1, 2], SamplingParams(), 0, priority=priority, tenant=tenant, weight=weight, adapter=adapter
    )


def many(tenant: str, count: int, **more: object) -> list[GenerateMsg]:
    return [message(f"{tenant}{i}", tenant, **more) for i in range(count)]


class Outbox:
    """Collect what a sender sends, and call what it puts off when ``run`` is called, or a pause after ``now`` is over."""

    def __init__(self, window: int = 4, most: int = 100) -> None:
        self.sent: list[str] = []
        self.later: list = []
        self.pauses: list = []
        self.now = 1000.0
        self.sender = FairSender(lambda msg: self.sent.append(msg.rid), self._put_off, window, most, lambda: self.now)

    def _put_off(self, seconds: float, call: Callable[[], None]) -> None:
        assert seconds in (0.0, PAUSE_SECONDS)
        (self.pauses if seconds else self.later).append(call)

    def run(self) -> None:
        while self.later:
            self.later.pop(0)()

    def end_pause(self) -> None:
        self.now += PAUSE_SECONDS
        self.pauses.pop()()
        self.run()


def test_requests_beyond_the_window_wait_and_others_pass_them():
    box = Outbox(window=4)
    box.sender.put(many("a", 50))
    assert box.sent == ["a0", "a1", "a2", "a3"]
    box.sender.put(many("b", 2))
    assert box.sent[4:] == ["b0", "b1"]
    box.sender.finished("a2")
    assert box.sent[6:] == ["a4"]
    assert len(box.sender) == 45


def test_many_messages_are_sent_in_parts():
    box = Outbox(window=1000, most=1000)
    box.sender.put(many("a", 500))
    assert len(box.sent) == AT_ONCE
    box.sender.put(many("b", 1))
    box.later.pop(0)()
    assert "b0" in box.sent[: 2 * AT_ONCE]
    box.run()
    while box.pauses:
        box.end_pause()
    assert len(box.sent) == 501


def test_the_engine_does_not_get_a_whole_window_at_once_while_several_tenants_send_requests():
    """It reads everything before its next step, in which the request of another tenant could run."""
    box = Outbox(window=1000, most=1000)
    box.sender.put([message("first", "b")])
    box.sender.put(many("a", 200))
    box.run()
    assert len(box.sent) == 1 + AT_ONCE_SHARED
    box.sender.put([message("second", "b")])
    assert box.sent[-1] == "second", "other tenants do not wait for the end of the pause"
    box.sender.finished("a0")
    assert box.sent[-1] == "second"
    box.end_pause()
    assert len(box.sent) == 2 + 2 * AT_ONCE_SHARED
    while box.pauses:
        box.end_pause()
    assert len(box.sent) == 202


def test_a_tenant_that_is_alone_again_fills_its_window_at_once():
    box = Outbox(window=1000, most=1000)
    box.sender.put([message("b", "b")])
    box.sender.put([message("a", "a")])
    box.now += SHARED_SECONDS
    box.sender.put(many("a", 200))
    box.run()
    assert (len(box.sent), box.pauses) == (202, [])


def test_priority_goes_first_within_a_tenant():
    box = Outbox(window=1)
    box.sender.put([message("a", "a")])
    box.sender.put([message("low", "a", -1), message("high", "a", 5), message("normal", "a")])
    for rid in ("a", "high", "normal"):
        box.sender.finished(rid)
    assert box.sent == ["a", "high", "normal", "low"]


def test_what_is_dropped_is_not_sent_and_what_was_sent_is_not_dropped():
    box = Outbox(window=2)
    box.sender.put(many("a", 4))
    assert box.sender.drop("a2")
    assert not box.sender.drop("a0")
    box.sender.finished("a0")
    assert box.sent == ["a0", "a1", "a3"]
    box.sender.finished("unknown")
    assert len(box.sender) == 0


def test_all_requests_of_an_adapter_are_sent_and_the_others_wait_for_their_turn():
    box = Outbox(window=2)
    box.sender.put([message("plain", "a")])
    box.sender.put([message(f"x{i}", "a", adapter="x") for i in range(3)])
    box.sender.put([message("y", "a", adapter="y"), message("first", "a", priority=1, adapter="x")])
    box.sender.put([message(f"b{i}", "b", adapter="x") for i in range(3)])
    box.sender.drop("x2")
    assert box.sent == ["plain", "x0", "b0", "b1"]
    box.sender.send_of_adapter("x")
    assert box.sent[4:] == ["first", "x1", "b2"]
    assert box.sender.unsent == ["y"]
    for rid in ("plain", "x0"):
        box.sender.finished(rid)
        assert len(box.sent) == 7, "two requests of the tenant are in the engine"
    box.sender.finished("x1")
    assert box.sent[7:] == ["y"]
    for rid in box.sent:
        box.sender.finished(rid)
    box.sender.put(many("a", 9, adapter="z"))
    assert box.sent[8:] == ["a0", "a1"]
    box.sender.send_of_adapter("x")
    assert (len(box.sent), len(box.sender)) == (10, 7)


def test_a_tenant_that_fills_the_queue_is_refused_and_others_are_not():
    box = Outbox(window=1, most=10)
    box.sender.check("a", 9)
    box.sender.put(many("a", 9))
    with pytest.raises(QueueFullError, match=r"scheduler\.max_waiting"):
        box.sender.check("a", 9)
    box.sender.check("b", 9)
    box.sender.put(many("b", 9))
    box.sender.check("c", 3)


def test_after_the_engine_has_ended_nothing_is_sent():
    box = Outbox(window=100)
    box.sender.put(many("a", 99))
    box.sender.clear()
    box.run()
    assert len(box.sent) == AT_ONCE
    box.sender.put([message("new", "a")])
    assert box.sent[-1] == "new"
