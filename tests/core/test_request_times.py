"""Test what the engine reports about the time that a request waits: for its constraint, and for its admission.

.venv/bin/python -m pytest -q tests/core/test_request_times.py
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dovetail.constraints import requests
from dovetail.constraints.requests import RequestConstraints
from dovetail.messages import TokenOutput, decode_from_engine, encode
from dovetail.sampling_params import GrammarKind, GrammarSpec, SamplingParams
from dovetail.scheduler.limits import Totals
from dovetail.scheduler.outcome import aborted, take_tokens
from dovetail.types import FinishKind, FinishReason, Req


class Service:
    """Compile nothing: a test says when a ticket is ready."""

    def __init__(self) -> None:
        self.ticket = SimpleNamespace(ready=False, backend="fake", cancel=lambda: None)

    def submit(self, *request: object) -> Any:
        return self.ticket

    def matcher(self, ticket: Any) -> Any:
        return SimpleNamespace()

    def meter(self, ticket: Any) -> Any:
        return SimpleNamespace()

    def backend(self, name: str) -> None:
        return None


def request(**params: Any) -> Req:
    req = Req("r", np.zeros(16, np.int32), 4, SamplingParams(**params), arrival=100.0)
    req.known_len = req.device_len = 4
    return req


def test_the_time_of_a_compilation_counts_from_the_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(requests, "time", SimpleNamespace(monotonic=lambda: now[0]))
    service = Service()
    constraints = RequestConstraints(service, 32, [1])  # type: ignore[arg-type]
    req = request(grammar=GrammarSpec(GrammarKind.REGEX, "a"))
    constraints.begin(req)
    assert constraints.num_compiling == 1
    assert constraints.collect() == []
    service.ticket.ready, now[0] = True, 101.5
    assert constraints.collect() == [(req, None)]
    assert (constraints.num_compiling, req.compile_seconds) == (0, 1.5)
    other = request(grammar=GrammarSpec(GrammarKind.REGEX, "a"))
    constraints.begin(other)
    constraints.cancel(other)
    assert constraints.num_compiling == 0


def test_times_are_sent_with_the_first_output_only() -> None:
    req = request()
    req.queue_seconds, req.compile_seconds = 0.25, 0.125
    first = take_tokens(req, [5], None, frozenset(), Totals())
    second = take_tokens(req, [6], None, frozenset(), Totals())
    assert (first.queue_seconds, first.compile_seconds) == (0.25, 0.125)
    assert (second.queue_seconds, second.compile_seconds) == (None, None)
    assert b"seconds" not in encode([second])
    assert decode_from_engine(encode([first, second])) == [first, second]


def test_an_aborted_request_reports_how_long_it_has_waited() -> None:
    req = request()
    req.finish = FinishReason(FinishKind.ABORT)
    assert aborted(req) == TokenOutput("r", [], req.finish, 4)  # it was never admitted
    req.queue_seconds = 0.25
    assert aborted(req).queue_seconds == 0.25
