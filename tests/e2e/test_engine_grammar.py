"""Constrained outputs through the whole engine, beside free ones, in little memory and with the host one step behind.

.venv/bin/python -m pytest -q tests/e2e/test_engine_grammar.py
"""

import json
import re
import threading

import pytest
from engine_runs import Traffic, TreeDrafter, check_idle, drafting

from dovetail import LLM, SamplingParams
from dovetail.constraints.backend_choice import GrammarEngine
from dovetail.constraints.compilers import ThreadCompiler
from dovetail.constraints.service import GrammarService
from dovetail.errors import EngineError, RequestError
from dovetail.interfaces.features import Feature
from dovetail.interfaces.grammar import CompiledGrammar, GrammarBackend, Matcher
from dovetail.sampling_params import GrammarKind, GrammarSpec
from dovetail.scheduler import admission

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "long tag"]}, "maxItems": 3},
        "n": {"type": "integer", "minimum": -5, "maximum": 2000},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "n"],
    "additionalProperties": False,
}
REGEX = r"(yes|no), [A-Z][a-z]{2,9}( [0-9]{1,3}){0,2}\."
EBNF = 'root ::= pair ("; " pair)*\npair ::= [a-z]+ " = " [0-9]+'
PAIR = r"[a-z]+ = [0-9]+"


def spec(kind):
    text = {"json_schema": json.dumps(SCHEMA), "regex": REGEX, "ebnf": EBNF}[kind]
    return GrammarSpec(GrammarKind(kind), text)


def valid(kind, text):
    if kind == "json_schema":
        value = json.loads(text)
        jsonschema_ok(value)
    elif kind == "regex":
        assert re.fullmatch(REGEX, text)
    else:
        assert re.fullmatch(f"{PAIR}(; {PAIR})*", text)


def jsonschema_ok(value):
    assert set(value) <= set(SCHEMA["properties"])
    assert {"name", "n"} <= set(value)
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 8
    assert isinstance(value["n"], int)
    assert -5 <= value["n"] <= 2000
    assert set(value.get("tags", [])) <= {"a", "b", "long tag"}
    assert len(value.get("tags", [])) <= 3
    assert isinstance(value.get("ok", True), bool)


def tiny(**sections):
    """Compile on threads by default: a process costs seconds of imports, and no constraint here is hostile."""
    return LLM("tiny", device="cpu", threads=1, **({"grammar": {"isolation": "thread"}} | sections))


@pytest.fixture(scope="module")
def llm():
    engine = tiny(grammar="auto")
    yield engine
    engine.close()


def is_prefix(llm, kind, token_ids):
    """Every token but an end-of-sequence one is accepted by a fresh matcher."""
    ticket = llm.loop.constraints.service.submit(spec(kind))
    while not ticket.ready:
        pass
    matcher = ticket.matcher()
    return all(matcher.accept(token) for token in token_ids)


@pytest.mark.parametrize(("overlap", "drafts"), [(False, False), (True, False), (False, True)])
def test_sixty_hot_requests_beside_free_ones_in_little_memory(overlap, drafts, monkeypatch):
    monkeypatch.setattr(admission, "DECODE_HEADROOM", 0)
    llm = tiny(memory={"page_size": 4, "num_pages": 150}, scheduler={"overlap": overlap, "chunk_size": 64})
    kinds = ["json_schema", "regex", "ebnf", None]
    rows = [(kinds[i % 4], 12 if i % 5 == 0 else 100) for i in range(80)]
    params = [
        SamplingParams(max_new_tokens=most, temperature=1.5, seed=i, grammar=spec(kind) if kind else None, logprobs=0)
        for i, (kind, most) in enumerate(rows)
    ]
    prompts = [f"Say something, number {i}: " for i in range(80)]
    with drafting(llm, TreeDrafter(width=3, vocab=4096) if drafts else None):
        outputs = llm.generate(prompts, params)
    ended = 0
    for (kind, _), output in zip(rows, outputs, strict=True):
        if kind is None:
            continue
        if output.finish.kind == "stop":
            valid(kind, output.text)
            ended += 1
        else:
            assert output.finish.kind == "length"
            assert is_prefix(llm, kind, output.token_ids)
    assert ended > 20
    assert llm.loop.stats().retractions > 0
    check_idle(llm)


def test_eos_is_the_only_way_out_and_the_only_way_on(llm):
    """``min_new_tokens`` forbids the end of a text, but not where the grammar allows nothing else."""
    one = GrammarSpec(GrammarKind.REGEX, "cat")
    for low in (0, 4, 5):
        params = SamplingParams(grammar=one, max_new_tokens=5, min_new_tokens=low, temperature=1.5, seed=1)
        output = llm.generate("x", params)[0]
        assert (output.text, output.finish.kind) == ("cat", "stop")
    optional = GrammarSpec(GrammarKind.REGEX, "(ab){0,9}")
    params = SamplingParams(grammar=optional, max_new_tokens=30, min_new_tokens=3, seed=1, n=8, temperature=1.5)
    for output in llm.generate("x", params):
        assert re.fullmatch("(ab){0,9}", output.text)
        assert len(output.token_ids) >= 3
    check_idle(llm)


def test_a_stop_token_that_the_grammar_asks_for_is_taken_under_min_new_tokens(llm):
    token = llm.tokenizer.encode("cat", add_special_tokens=False)
    spec = GrammarSpec(GrammarKind.REGEX, "cat")
    params = SamplingParams(grammar=spec, max_new_tokens=9, min_new_tokens=8, stop_token_ids=tuple(range(4096)), seed=1)
    output = llm.generate("x", params)[0]
    assert (output.text, output.finish.kind) == ("cat", "stop")
    assert len(token) <= 3


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", "{"),
        ("json_schema", '{"type": "fruit"}'),
        ("regex", "(a"),
        ("ebnf", "root ::= oops"),
        ("regex", "x" * 300_000),
    ],
)
def test_a_grammar_that_is_wrong_is_a_request_error(llm, kind, text):
    bad = SamplingParams(grammar=GrammarSpec(GrammarKind(kind), text), max_new_tokens=5)
    with pytest.raises(RequestError) as caught:
        llm.generate(["good", "bad"], [SamplingParams(max_new_tokens=50), bad])
    assert caught.value.code == "invalid_grammar"
    check_idle(llm)
    assert len(llm.generate("good", SamplingParams(max_new_tokens=5, ignore_eos=True))[0].token_ids) == 5


def test_no_grammar_backend_is_said():
    llm = tiny(grammar="none")
    with pytest.raises(RequestError, match="cannot constrain its output"):
        llm.generate("x", SamplingParams(grammar=spec("regex")))
    check_idle(llm)


# -- backends that are slow or broken --------------------------------------------------------------------------------


class OddMatcher(Matcher):
    """Allows every token; raises from the n-th call of what ``text`` names on."""

    def __init__(self, text):
        name, count = text.split()
        self.name, self.left = name, int(count)

    def _call(self, name):
        self.left -= name == self.name
        if name == self.name and self.left <= 0:
            raise KeyError(f"odd {name}")

    def fill_bitmask(self, bitmask, row):
        self._call("fill")
        bitmask[row] = -1

    def accept(self, token_id):
        self._call("accept")
        return True

    def rollback(self, num_tokens):
        self._call("rollback")

    @property
    def is_terminated(self):
        self._call("terminated")
        return False


class OddCompiled(CompiledGrammar):
    def __init__(self, text):
        self.text = text

    def matcher(self):
        if self.text == "matcher 1":
            raise KeyError("odd matcher")
        return OddMatcher(self.text)


class OddBackend(GrammarBackend):
    """Compiles "slow" texts once its gate is open."""

    def __init__(self):
        self.gate = threading.Event()

    def compile(self, spec):
        if spec.text.startswith("slow"):
            assert self.gate.wait(20)
        if spec.text == "compile 1":
            raise KeyError("odd compile")
        return OddCompiled(spec.text)


def odd_service(backend):
    offers = frozenset({Feature.GRAMMAR_EBNF, Feature.GRAMMAR_ROLLBACK})
    return GrammarService(ThreadCompiler([GrammarEngine("odd", offers, lambda: backend)], 10), workers=3)


@pytest.fixture(params=[False, True], ids=["", "overlap"])
def odd(request):
    llm = tiny(scheduler={"overlap": request.param})
    llm.loop.constraints.close()
    backend = OddBackend()
    llm.loop.constraints.service = odd_service(backend)
    yield llm, backend
    backend.gate.set()
    llm.close()


def with_text(text, **params):
    grammar = GrammarSpec(GrammarKind.EBNF, text)
    return SamplingParams(**({"max_new_tokens": 12, "temperature": 0, "ignore_eos": True} | params), grammar=grammar)


def test_a_slow_compile_stops_no_other_request(odd):
    llm, backend = odd
    traffic = Traffic(llm)
    traffic.add("slow", [5, 6, 7], with_text("slow 1"))
    traffic.add("gone", [5, 6, 7], with_text("slow 2"))
    for i in range(5):
        traffic.add(
            f"r{i}", [5, 6, 7, i], with_text("never 1") if i % 2 else SamplingParams(max_new_tokens=8, ignore_eos=True)
        )
    for _ in range(60):
        traffic.step()
    assert set(traffic.ends) == {f"r{i}" for i in range(5)}
    traffic.abort("gone")
    backend.gate.set()
    traffic.finish()
    assert (traffic.kind("slow"), traffic.kind("gone")) == ("length", "abort")
    check_idle(llm)


@pytest.mark.parametrize(
    "text", ["fill 1", "fill 4", "accept 1", "accept 5", "terminated 1", "terminated 5", "matcher 1", "compile 1"]
)
def test_a_matcher_that_raises_ends_its_own_request(odd, text):
    llm, _ = odd
    free = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    expected = llm.generate("The quick brown", SamplingParams(**free))[0].token_ids
    ids = llm.tokenizer.encode("The quick brown")
    traffic = Traffic(llm)
    for i, params in enumerate([SamplingParams(**free), with_text(text), with_text("never 1"), SamplingParams(**free)]):
        traffic.add(f"r{i}", ids, params)
    traffic.finish()
    for rid in ("r0", "r2", "r3"):
        assert traffic.tokens[rid] == expected
        assert traffic.kind(rid) == "length"
    assert f"odd {text.split()[0]}" in traffic.ends["r1"].message
    check_idle(llm)
    with pytest.raises(RequestError if text == "compile 1" else EngineError, match="odd"):
        llm.generate("The quick brown", with_text(text))
    assert llm.generate("The quick brown", SamplingParams(**free))[0].token_ids == expected


@pytest.mark.parametrize("text", ["rollback 1", "rollback 3", "fill 6", "accept 7"])
def test_a_matcher_that_raises_under_drafts(odd, text):
    llm, _ = odd
    if llm.loop.overlap:
        return
    free = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    outputs = llm.generate("The quick brown", SamplingParams(**free))
    drafter = TreeDrafter(right=0.9, vocab=4096)
    drafter.learn(outputs)
    traffic = Traffic(llm)
    with drafting(llm, drafter):
        for i, params in enumerate([SamplingParams(**free), with_text(text), with_text("never 1")]):
            traffic.add(f"r{i}", outputs[0].prompt_ids, params)
        traffic.finish()
    assert traffic.tokens["r0"] == traffic.tokens["r2"] == outputs[0].token_ids
    assert "odd" in traffic.ends["r1"].message
    check_idle(llm)


# -- which backend, and clients that leave ---------------------------------------------------------------------------


def test_a_request_names_its_backend_and_the_output_says_which_served_it(llm):
    names = [chosen.name for chosen in llm.resolved.grammars]
    for name in names:
        asked = GrammarSpec(GrammarKind.REGEX, "(ab|cd){2}", name)
        output = llm.generate("x", SamplingParams(grammar=asked, max_new_tokens=9, seed=1))[0]
        assert re.fullmatch("(ab|cd){2}", output.text)
        assert output.grammar_backend == name
    assert llm.generate("x", SamplingParams(max_new_tokens=2))[0].grammar_backend is None
    with pytest.raises(RequestError, match=f"this server has: {', '.join(names)}"):
        llm.generate("x", SamplingParams(grammar=GrammarSpec(GrammarKind.REGEX, "a", "unknown")))
    check_idle(llm)


def test_a_request_that_leaves_while_it_compiles_leaves_nothing_behind(llm):
    slow = GrammarSpec(
        GrammarKind.JSON_SCHEMA, json.dumps({"enum": ["y" * 9 + str(i) for i in range(14_000)]}), "xgrammar"
    )
    traffic = Traffic(llm)
    traffic.add("gone", [5, 6, 7], SamplingParams(grammar=slow, max_new_tokens=8))
    traffic.add("free", [5, 6, 7], SamplingParams(max_new_tokens=8, ignore_eos=True))
    for _ in range(4):
        traffic.step()
    traffic.abort("gone")
    traffic.finish()
    assert (traffic.kind("gone"), traffic.kind("free")) == ("abort", "length")
    assert not llm.loop.scheduler.waiting
    check_idle(llm)
