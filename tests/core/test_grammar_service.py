"""The compile service: caching, sharing, bounds and refusals. Run: python -m pytest tests/core/test_grammar_service.py"""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest

from dovetail.errors import GrammarError
from dovetail.interfaces.grammar import CompiledGrammar, GrammarBackend, Matcher
from dovetail.scheduler.grammar import MAX_TEXT_BYTES, GrammarService, GrammarTicket
from dovetail.types import GrammarKind, GrammarSpec, IntArray


class FakeMatcher(Matcher):
    def __init__(self, text: str) -> None:
        self.text = text

    def fill_bitmask(self, bitmask: IntArray, row: int) -> None:
        bitmask[row] = 0

    def accept(self, token_id: int) -> bool:
        return False

    def rollback(self, num_tokens: int) -> None:
        return

    @property
    def is_terminated(self) -> bool:
        return True


class FakeCompiled(CompiledGrammar):
    def __init__(self, text: str, size: int) -> None:
        self.text = text
        self.size = size

    def matcher(self) -> FakeMatcher:
        return FakeMatcher(self.text)

    @property
    def num_bytes(self) -> int:
        return self.size


class FakeBackend(GrammarBackend):
    """Compiles once ``gate`` is open; refuses "bad", breaks on "bug"."""

    def __init__(self, size: int = 0) -> None:
        self.size = size
        self.gate = threading.Event()
        self.gate.set()
        self.started = Counter[str]()
        self.threads = set[int]()

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        self.started[spec.text] += 1
        self.threads.add(threading.get_ident())
        assert self.gate.wait(20)
        if spec.text == "bad":
            raise GrammarError("the grammar is bad at line 1")
        if spec.text == "bug":
            raise KeyError("oops")
        return FakeCompiled(spec.text, self.size)


def regex(text: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, text)


def wait(ticket: GrammarTicket) -> GrammarTicket:
    end = time.monotonic() + 10
    while not ticket.ready:
        assert time.monotonic() < end, "the ticket is never ready"
        time.sleep(0.001)
    return ticket


def matched_text(ticket: GrammarTicket) -> str:
    matcher = wait(ticket).matcher()
    assert isinstance(matcher, FakeMatcher)
    return matcher.text


@pytest.fixture
def backend():
    fake = FakeBackend()
    yield fake
    fake.gate.set()


def test_compiles_on_another_thread_without_blocking(backend: FakeBackend) -> None:
    backend.gate.clear()
    service = GrammarService(backend)
    ticket = service.submit(regex("a"))
    assert not ticket.ready
    backend.gate.set()
    assert matched_text(ticket) == "a"
    assert threading.get_ident() not in backend.threads
    service.close()


def test_equal_specs_compile_once_and_have_matchers_of_their_own(backend: FakeBackend) -> None:
    backend.gate.clear()
    service = GrammarService(backend, workers=4)
    waiting = [service.submit(regex("a")) for _ in range(5)]
    backend.gate.set()
    matchers = [wait(ticket).matcher() for ticket in [*waiting, service.submit(regex("a"))]]
    assert len({id(matcher) for matcher in matchers}) == 6
    assert (backend.started["a"], service.compiles, service.hits) == (1, 1, 5)
    assert matched_text(service.submit(GrammarSpec(GrammarKind.EBNF, "a"))) == "a"
    assert service.compiles == 2, "the kind is part of the key"
    service.close()


def test_the_least_recently_used_grammar_makes_room() -> None:
    backend = FakeBackend(size=100_000)
    service = GrammarService(backend, cache_bytes=250_000)
    for text in ("a", "b", "a", "c", "a"):
        matched_text(service.submit(regex(text)))
    assert backend.started == {"a": 1, "b": 1, "c": 1}, "a was used after b, so b made room for c"
    assert service.cached_bytes <= 250_000
    matched_text(service.submit(regex("b")))
    assert backend.started["b"] == 2
    service.close()


def test_a_grammar_larger_than_the_cache_is_used_and_not_kept() -> None:
    backend = FakeBackend(size=10_000)
    service = GrammarService(backend, cache_bytes=5_000)
    assert matched_text(service.submit(regex("a"))) == "a"
    assert service.cached_bytes == 0
    service.close()


def test_refusals_reach_every_ticket_and_are_not_remembered(backend: FakeBackend) -> None:
    service = GrammarService(backend)
    for _ in range(2):
        with pytest.raises(GrammarError, match="bad at line 1"):
            wait(service.submit(regex("bad"))).matcher()
    assert backend.started["bad"] == 2
    with pytest.raises(GrammarError, match=r"regex could not be compiled.*oops") as caught:
        wait(service.submit(regex("bug"))).matcher()
    assert isinstance(caught.value.__cause__, KeyError)
    assert service.cached_bytes == 0
    service.close()


def test_a_slow_compilation_fails_its_request_and_keeps_its_thread_only(backend: FakeBackend) -> None:
    backend.gate.clear()
    service = GrammarService(backend, workers=2, timeout=0.05)
    for _ in range(3):
        with pytest.raises(GrammarError, match=r"longer than 0\.05 s to compile"):
            wait(service.submit(regex("slow"))).matcher()
    assert backend.started["slow"] == 1, "the same constraint takes no second thread"
    backend.gate.set()
    assert matched_text(service.submit(regex("next"))) == "next"
    service.close()


def test_a_constraint_that_nobody_waits_for_is_not_compiled(backend: FakeBackend) -> None:
    backend.gate.clear()
    service = GrammarService(backend, workers=1)
    first = service.submit(regex("first"))
    alone, left, kept = (service.submit(regex(text)) for text in ("alone", "shared", "shared"))
    for ticket in (alone, left):
        ticket.cancel()
        assert ticket.ready
        with pytest.raises(GrammarError, match="cancelled"):
            ticket.matcher()
    backend.gate.set()
    assert [matched_text(ticket) for ticket in (first, kept)] == ["first", "shared"]
    assert backend.started == {"first": 1, "shared": 1}
    assert matched_text(service.submit(regex("alone"))) == "alone"
    service.close()


def test_without_a_backend_the_reason_and_the_way_out_are_told() -> None:
    service = GrammarService(None, reason="xgrammar 0.1 is installed, >=0.2 is needed")
    with pytest.raises(GrammarError, match=r"xgrammar 0\.1 is installed.*pip install xgrammar") as caught:
        service.submit(regex("a"))
    assert caught.value.param == "regex"
    service.close()


def test_large_constraints_are_refused_at_once(backend: FakeBackend) -> None:
    service = GrammarService(backend)
    with pytest.raises(GrammarError, match=f"{MAX_TEXT_BYTES + 2} bytes; allowed: {MAX_TEXT_BYTES}"):
        service.submit(regex("é" * (MAX_TEXT_BYTES // 2 + 1)))
    assert service.compiles == 0
    service.close()


def test_close_ends_those_who_wait(backend: FakeBackend) -> None:
    backend.gate.clear()
    service = GrammarService(backend, workers=1)
    service.submit(regex("running"))
    while not backend.started["running"]:
        time.sleep(0.001)
    waiting = service.submit(regex("waiting"))
    service.close()
    assert waiting.ready
    with pytest.raises(GrammarError, match="cancelled"):
        waiting.matcher()
    backend.gate.set()
    assert "waiting" not in backend.started
