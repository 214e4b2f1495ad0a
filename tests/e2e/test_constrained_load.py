"""Five hundred constrained requests among free ones, hot, cut and aborted at random: what ends is valid, what is cut is a prefix.

.venv/bin/python -m pytest -q -p no:xdist tests/e2e/test_constrained_load.py
"""

import json
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from engine_runs import Traffic, check_idle

from dovetail import LLM, SamplingParams
from dovetail.messages import GenerateMsg
from dovetail.sampling_params import GrammarKind, GrammarSpec
from dovetail.scheduler import admission
from dovetail.types import FinishKind, FinishReason

CONSTRAINED = 500
FREE = 100
CHOICES = ["alpha", "beta (x)", 'say "hi"', "été", "[ab]*", "al"]


def is_card(text: str) -> bool:
    """What ``CARD`` allows."""
    value = json.loads(text)
    known = {"name", "tags", "n", "ok", "at"}
    return (
        isinstance(value, dict)
        and {"name", "n"} <= value.keys() <= known
        and isinstance(value["name"], str)
        and len(value["name"]) <= 8
        and type(value["n"]) is int
        and -5 <= value["n"] <= 2000
        and type(value.get("ok", True)) is bool
        and len(value.get("tags", [])) <= 3
        and set(value.get("tags", [])) <= {"a", "b", "long tag"}
        and is_point(value.get("at", {"x": 0}))
    )


def is_point(value: dict[str, Any]) -> bool:
    """What the schema of ``at`` allows."""
    return value.keys() == {"x"} and (value["x"] is None or type(value["x"]) is int)


CARD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "long tag"]}, "maxItems": 3},
        "n": {"type": "integer", "minimum": -5, "maximum": 2000},
        "ok": {"type": "boolean"},
        "at": {
            "type": "object",
            "properties": {"x": {"type": ["integer", "null"]}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "n"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4}


def is_list(text: str) -> bool:
    """What ``LIST`` allows."""
    value = json.loads(text)
    return isinstance(value, list) and 1 <= len(value) <= 4 and all(type(item) is bool for item in value)


class Constraint(NamedTuple):
    """A constraint, and an independent check of whole outputs."""

    kind: GrammarKind
    text: str
    valid: Callable[[str], object]


def regex(pattern: str) -> Constraint:
    return Constraint(GrammarKind.REGEX, pattern, lambda text: re.fullmatch(pattern, text))


CONSTRAINTS = [
    Constraint(GrammarKind.JSON_SCHEMA, json.dumps(CARD), is_card),
    Constraint(GrammarKind.JSON_SCHEMA, json.dumps(LIST), is_list),
    regex(r"(yes|no), [A-Z][a-z]{2,9}( [0-9]{1,3}){0,2}\."),
    regex(r"(ab|ba){1,12}c?"),
    regex(r"[0-9]{4}-(0[1-9]|1[0-2])-[0-3][0-9]"),
    Constraint(GrammarKind.CHOICE, json.dumps(CHOICES), CHOICES.__contains__),
]


class Job(NamedTuple):
    """One request; ``constraint`` is None for a free one."""

    constraint: Constraint | None
    params: SamplingParams
    prompt: list[int]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Return an engine whose pages hold less than half of the running requests. It compiles on threads, because no constraint here is hostile."""
    engine = LLM(
        "tiny",
        device="cpu",
        threads=1,
        memory={"page_size": 4, "num_pages": 90},
        scheduler={"max_running": 32, "chunk_size": 64},
        grammar={"isolation": "thread"},
    )
    yield engine
    engine.close()


def jobs(llm: LLM, rng: random.Random) -> list[Job]:
    """Constrained requests over every backend, and free ones, shuffled."""
    backends = [None, *(chosen.name for chosen in llm.resolved.grammars)]
    made = [job(llm, rng, CONSTRAINTS[i % len(CONSTRAINTS)], rng.choice(backends)) for i in range(CONSTRAINED)]
    made += [job(llm, rng, None, None) for _ in range(FREE)]
    rng.shuffle(made)
    return made


def job(llm: LLM, rng: random.Random, constraint: Constraint | None, backend: str | None) -> Job:
    params = SamplingParams(
        max_new_tokens=rng.choice([2, 7, 20, 80, 80, 80]),
        min_new_tokens=rng.choice([0, 0, 0, 2]),
        temperature=1.5,
        top_p=rng.choice([1.0, 0.9]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        stop=rng.choice([(), (), (), ("e",), ("a ", "0"), ('"n"',)]),
        logprobs=rng.choice([None, None, 2]),
        grammar=GrammarSpec(constraint.kind, constraint.text, backend) if constraint else None,
    )
    return Job(constraint, params, llm.tokenizer.encode(f"Say something, number {rng.randrange(40)}: "))


def drive(llm: LLM, made: list[Job], rng: random.Random) -> tuple[Traffic, set[str]]:
    """Add and abort the requests; return the traffic with their outputs, and the ids of the aborted ones."""
    traffic, aborted = Traffic(llm), set[str]()
    for i, (_, params, prompt) in enumerate(made):
        traffic.tokens[f"r{i}"] = []
        traffic.loop.handle(GenerateMsg(f"r{i}", prompt, params, seed=i))
        for _ in range(rng.choice([0, 0, 1])):
            traffic.step()
        if rng.random() < 0.15:
            aborted.add(victim := f"r{rng.randrange(max(0, i - 20), i + 1)}")
            traffic.abort(victim)
    traffic.finish(bound=200_000)
    return traffic, aborted


def is_prefix(llm: LLM, spec: GrammarSpec, token_ids: list[int]) -> bool:
    """Every token is accepted by a fresh matcher, by itself."""
    ticket = llm.loop.constraints.service.submit(spec)
    while not ticket.ready:
        time.sleep(0.001)
    matcher = ticket.matcher()
    return all(matcher.accept(token) for token in token_ids)


def whole(finish: FinishReason) -> bool:
    """True for an output that its grammar has ended: an end token, and no stop string."""
    return finish.kind is FinishKind.STOP and not isinstance(finish.matched, str)


def test_five_hundred_hot_constrained_requests(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "DECODE_HEADROOM", 0)
    rng = random.Random(7)
    made = jobs(llm, rng)
    traffic, aborted = drive(llm, made, rng)
    ended = cut = 0
    for i, (constraint, params, _) in enumerate(made):
        rid = f"r{i}"
        finish, tokens = traffic.ends[rid], traffic.tokens[rid]
        assert isinstance(finish, FinishReason), finish
        assert rid in aborted or finish.kind is not FinishKind.ABORT
        if constraint is None or params.grammar is None:
            continue
        if whole(finish):
            ended += 1
            text = llm.tokenizer.decode(tokens, skip_special_tokens=True)
            assert constraint.valid(text), (params.grammar, text)
        else:
            cut += 1
            assert is_prefix(llm, params.grammar, tokens), (params.grammar, llm.tokenizer.decode(tokens))
    assert ended > 150
    assert cut > 100
    stats = llm.loop.stats()
    assert stats.retractions > 0
    assert set(stats.grammar_requests) == {chosen.name for chosen in llm.resolved.grammars}
    check_idle(llm)
