"""Test the compile service: caching, sharing, bounds and refusals.

Run: python -m pytest tests/core/test_grammar_service.py
"""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest

from dovetail.constraints import cache as grammar_cache
from dovetail.constraints.backend_choice import GrammarEngine
from dovetail.constraints.compilers import ThreadCompiler
from dovetail.constraints.jobs import GrammarTicket
from dovetail.constraints.limits import MAX_NESTING, MAX_TEXT_BYTES, nesting
from dovetail.constraints.service import GrammarService
from dovetail.errors import EngineError, GrammarError, QueueFullError
from dovetail.interfaces.features import Feature
from dovetail.interfaces.grammar import CompiledGrammar, GrammarBackend, Matcher
from dovetail.sampling_params import GrammarKind, GrammarSpec
from dovetail.types import IntArray


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
    """Compile once ``gate`` is open; refuse "bad", and fail on "bug"."""

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


OFFERS = frozenset({Feature.GRAMMAR_REGEX, Feature.GRAMMAR_EBNF})


def service_of(*backends: GrammarBackend, timeout: float = 10, **settings: int) -> GrammarService:
    """Return a service on threads whose backends are called a, b, ..."""
    engines = [
        GrammarEngine(name, OFFERS, lambda backend=backend: backend)
        for name, backend in zip("abc", backends, strict=False)
    ]
    return GrammarService(ThreadCompiler(engines, timeout), **settings)


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
    service = service_of(backend)
    ticket = service.submit(regex("a"))
    assert not ticket.ready
    backend.gate.set()
    assert matched_text(ticket) == "a"
    assert threading.get_ident() not in backend.threads
    service.close()


def test_equal_specs_compile_once_and_have_matchers_of_their_own(backend: FakeBackend) -> None:
    backend.gate.clear()
    service = service_of(backend, workers=4)
    waiting = [service.submit(regex("a")) for _ in range(5)]
    backend.gate.set()
    matchers = [wait(ticket).matcher() for ticket in [*waiting, service.submit(regex("a"))]]
    assert len({id(matcher) for matcher in matchers}) == 6
    assert (backend.started["a"], service.totals.compiles, service.totals.hits) == (1, 1, 5)
    assert matched_text(service.submit(GrammarSpec(GrammarKind.EBNF, "a"))) == "a"
    assert service.totals.compiles == 2, "the kind is part of the key"
    service.close()


def test_the_least_recently_used_grammar_is_evicted() -> None:
    backend = FakeBackend(size=100_000)
    service = service_of(backend, cache_bytes=250_000)
    for text in ("a", "b", "a", "c", "a"):
        matched_text(service.submit(regex(text)))
    assert backend.started == {"a": 1, "b": 1, "c": 1}, "a was used after b, so b was evicted for c"
    assert 200_000 < service.cached_bytes <= 250_000
    assert service.evictions == 1
    matched_text(service.submit(regex("b")))
    assert backend.started["b"] == 2
    service.close()


def test_a_grammar_larger_than_the_cache_is_used_and_not_kept() -> None:
    backend = FakeBackend(size=10_000)
    service = service_of(backend, cache_bytes=5_000)
    assert matched_text(service.submit(regex("a"))) == "a"
    assert service.cached_bytes == 0
    service.close()


def test_refusals_reach_every_ticket_and_are_remembered_for_a_while(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = service_of(backend)
    for _ in range(3):
        with pytest.raises(GrammarError, match="bad at line 1"):
            wait(service.submit(regex("bad"))).matcher()
    assert (backend.started["bad"], service.totals.refusals) == (1, 1)
    with pytest.raises(GrammarError, match=r"regex could not be compiled.*oops") as caught:
        wait(service.submit(regex("bug"))).matcher()
    assert isinstance(caught.value.__cause__, KeyError)
    service.close()
    monkeypatch.setattr(grammar_cache, "REFUSAL_SECONDS", 0.0)
    service = service_of(backend)
    for _ in range(2):
        with pytest.raises(GrammarError, match="bad at line 1"):
            wait(service.submit(regex("bad"))).matcher()
    assert backend.started["bad"] == 3
    service.close()


def test_a_slow_compilation_fails_its_request_and_keeps_its_thread_only(backend: FakeBackend) -> None:
    backend.gate.clear()
    service = service_of(backend, workers=2, timeout=0.05)
    for _ in range(3):
        with pytest.raises(GrammarError, match=r"longer than 0\.05 s to compile"):
            wait(service.submit(regex("slow"))).matcher()
    assert backend.started["slow"] == 1, "the same constraint takes one thread"
    backend.gate.set()
    assert matched_text(service.submit(regex("next"))) == "next"
    service.close()


def test_a_constraint_without_waiting_requests_is_not_compiled(backend: FakeBackend) -> None:
    backend.gate.clear()
    service = service_of(backend, workers=1)
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


def test_without_a_backend_the_error_names_the_reason_and_the_way_out() -> None:
    service = GrammarService(None, reason="xgrammar 0.1 is installed, >=0.2 is needed")
    with pytest.raises(GrammarError, match=r"xgrammar 0\.1 is installed.*pip install xgrammar") as caught:
        service.submit(regex("a"))
    assert caught.value.param == "regex"
    service.close()


def test_large_constraints_are_refused_at_once(backend: FakeBackend) -> None:
    service = service_of(backend)
    with pytest.raises(GrammarError, match=f"{MAX_TEXT_BYTES + 2} bytes; allowed: {MAX_TEXT_BYTES}"):
        service.submit(regex("é" * (MAX_TEXT_BYTES // 2 + 1)))
    assert service.totals.compiles == 0
    service.close()


def test_close_ends_those_who_wait(backend: FakeBackend) -> None:
    backend.gate.clear()
    service = service_of(backend, workers=1)
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


# -- bounds on the text ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "depth"),
    [
        (GrammarKind.REGEX, "((a)|(b(c)))", 3),
        (GrammarKind.REGEX, r"\(\(([()(]|\])([^](]x)", 1),
        (GrammarKind.REGEX, "(" * 300 + ")" * 300, 300),
        (GrammarKind.REGEX, ")" * 300 + "(" * 5, 5),
        (GrammarKind.JSON_SCHEMA, '{"pattern": "[[[\\"{{", "items": [{}]}', 3),
        (GrammarKind.JSON_SCHEMA, '{"a":' * 250 + "1" + "}" * 250, 250),
        (GrammarKind.EBNF, 'root ::= ("((" [(({] ("a" {1,2}))', 3),
        (GrammarKind.LARK, r'start: ("[" [A])? /\(\(/', 2),
        (GrammarKind.JSON_OBJECT, "", 0),
    ],
)
def test_nesting_is_counted_outside_of_strings_and_classes(kind: GrammarKind, text: str, depth: int) -> None:
    assert nesting(GrammarSpec(kind, text)) == depth


@pytest.mark.parametrize("kind", GrammarKind)
def test_counting_takes_linear_time_whatever_the_text(kind: GrammarKind) -> None:
    start = time.thread_time()
    for text in ('"', "[", "(", "\\", '"\\', "[^", "[\\]", '"\n', '{"'):
        nesting(GrammarSpec(kind, text * (MAX_TEXT_BYTES // len(text))))
    assert time.thread_time() - start < 10


def test_deep_nesting_is_refused_before_the_backend_reads_it(backend: FakeBackend) -> None:
    service = service_of(backend)
    deep = "(" * (MAX_NESTING + 1) + "a" + ")" * (MAX_NESTING + 1)
    with pytest.raises(GrammarError, match=f"nested {MAX_NESTING + 1} deep; allowed: {MAX_NESTING}"):
        wait(service.submit(regex(deep))).matcher()
    assert not backend.started
    assert matched_text(service.submit(regex(deep[1:-1]))) == deep[1:-1]
    service.close()


# -- the choice among backends ---------------------------------------------------------------------------------------


class Picky(FakeBackend):
    """Support no text that contains one of ``lacks``; find those of ``late`` only when it compiles."""

    def __init__(self, lacks: str, late: str = "#") -> None:
        super().__init__()
        self.lacks = lacks
        self.late = late

    def check(self, spec: GrammarSpec) -> None:
        self._refuse(spec, self.lacks)

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        self._refuse(spec, self.late)
        return super().compile(spec)

    def _refuse(self, spec: GrammarSpec, lacking: str) -> None:
        if lacking in spec.text:
            raise GrammarError(f"no support for {lacking}", keyword=lacking)


def asked(text: str, backend: str | None = None) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, text, backend)


def backend_of(service: GrammarService, spec: GrammarSpec) -> str:
    ticket = wait(service.submit(spec))
    service.matcher(ticket)
    return ticket.backend


def test_the_first_backend_that_honours_a_constraint_compiles_it() -> None:
    a, b = Picky("x", late="y"), Picky("z")
    service = service_of(a, b)
    texts = ("plain", "with x", "with y", "with z")
    assert [backend_of(service, asked(text)) for text in texts] == ["a", "b", "b", "a"]
    assert a.started == {"plain": 1, "with z": 1}
    assert backend_of(service, asked("plain", "b")) == "b"
    assert service.totals.backends == {"a": 2, "b": 3}
    service.close()


def test_what_auto_has_compiled_is_found_by_name_and_the_other_way_round() -> None:
    a, b = Picky("x"), Picky("z")
    service = service_of(a, b)
    for spec in (asked("1 x"), asked("1 x", "b"), asked("2", "a"), asked("2")):
        backend_of(service, spec)
    assert (a.started, b.started) == ({"2": 1}, {"1 x": 1})
    assert (service.totals.misses, service.totals.hits) == (2, 2)
    service.close()


def test_a_refusal_names_the_keyword_for_each_engine_and_who_could() -> None:
    service = service_of(Picky("x"), Picky("x y"), Picky("z"))
    with pytest.raises(GrammarError) as caught:
        backend_of(service, asked("x y", "a"))
    text = str(caught.value)
    assert "by the grammar backend 'a': a does not support 'x' (no support for x)" in text
    assert "These may support it: c; name one as grammar_backend" in text
    assert (caught.value.code, caught.value.keyword, caught.value.param) == ("unsupported_grammar", "x", "regex")
    with pytest.raises(GrammarError) as caught:
        backend_of(service, asked("x y z"))
    text = str(caught.value)
    for part in ("a does not support 'x'", "b does not support 'x y'", "c does not support 'z'", "No other"):
        assert part in text
    service.close()


def test_a_constraint_that_is_wrong_is_not_tried_elsewhere() -> None:
    a, b = FakeBackend(), FakeBackend()
    service = service_of(a, b)
    with pytest.raises(GrammarError, match="bad at line 1") as caught:
        backend_of(service, asked("bad"))
    assert caught.value.code == "invalid_grammar"
    assert not b.started
    service.close()


def test_a_kind_that_a_backend_does_not_offer_is_passed_over_and_an_unknown_name_refused_at_once() -> None:
    a, b = FakeBackend(), FakeBackend()
    engines = [
        GrammarEngine("a", OFFERS, lambda: a),
        GrammarEngine("b", OFFERS | {Feature.GRAMMAR_LARK}, lambda: b, automatic=False),
    ]
    service = GrammarService(ThreadCompiler(engines, 10))
    lark = GrammarSpec(GrammarKind.LARK, "start: A")
    with pytest.raises(
        GrammarError,
        match=r"a does not support 'lark' \(it does not support constraints of kind lark\)\. These may support it: b",
    ):
        backend_of(service, lark)
    assert backend_of(service, GrammarSpec(GrammarKind.LARK, "start: A", "b")) == "b"
    with pytest.raises(GrammarError, match="grammar_backend is 'c'; this server has: a, b"):
        service.submit(asked("x", "c"))
    service.close()


def test_backends_are_built_when_first_needed_and_once() -> None:
    built = Counter[str]()

    def build(name: str) -> FakeBackend:
        built[name] += 1
        if name == "broken":
            raise ImportError("no such library")
        return FakeBackend()

    engines = [GrammarEngine(name, OFFERS, lambda name=name: build(name)) for name in ("a", "broken")]
    service = GrammarService(ThreadCompiler(engines, 10))
    assert not built
    for text in ("1", "2"):
        assert backend_of(service, asked(text)) == "a"
        with pytest.raises(EngineError, match="'broken' could not be built: ImportError: no such library"):
            backend_of(service, asked(text, "broken"))
    assert built == {"a": 1, "broken": 1}
    service.close()


def test_a_request_that_waits_too_long_for_a_thread_may_come_again(backend: FakeBackend) -> None:
    backend.gate.clear()
    service = service_of(backend, workers=1, timeout=0.05)
    service.submit(regex("slow"))
    with pytest.raises(QueueFullError, match="retry later"):
        wait(service.submit(regex("next"))).matcher()
    backend.gate.set()
    service.close()
