"""Test the lm_format_enforcer backend. Run: python -m pytest -q tests/plugins/test_grammar_lm_format_enforcer.py

The measured part reads the JSON Schema Test Suite and real schemas from the folder in GRAMMAR_CORPORA.
"""

from __future__ import annotations

import json
import os
import random
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.errors import GrammarError
from dovetail.interfaces.grammar import GrammarContext
from dovetail.sampling_params import GrammarKind, GrammarSpec
from dovetail.testing.grammar import GrammarSuite
from dovetail.testing.grammar_corpora import CorpusChecker, real_schemas, suite_schemas
from dovetail_grammar import automaton, json_numbers
from dovetail_grammar.automaton import Automaton
from dovetail_grammar.config import LMFormatEnforcerConfig
from dovetail_grammar.lm_format_enforcer_backend import LMFormatEnforcerBackend
from dovetail_grammar.utf8 import encoded

EOS = 256
WORDS = ['ab"', '",', '"}', "\\u00", '\\"', 'é"', "日本", '{"', '":', "abc", "  "]
CONTEXT = GrammarContext(257, [*(bytes([i]) for i in range(256)), None], (EOS,), "{}")
WITH_WORDS = GrammarContext(300, [*CONTEXT.token_bytes, *(word.encode() for word in WORDS)], (EOS,), "{}")
BACKEND = LMFormatEnforcerBackend(LMFormatEnforcerConfig(), CONTEXT)


@pytest.mark.sample(2)
class TestLMFormatEnforcer(GrammarSuite):
    name = "lm_format_enforcer"


def schema(value: Any) -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(value))


def passes(value: Any, text: bytes) -> bool:
    matcher = BACKEND.compile(schema(value)).matcher()
    return all(matcher.accept(byte) for byte in text) and matcher.accept(EOS)


@pytest.mark.parametrize(
    ("value", "good", "bad"),
    [
        # each is something that the library's own parser lets through, or never ends
        ({"type": "string"}, [rb'"\ud834\udd1e"', b'"a/\\/"'], [b'"\t"', b'"\x01"', b'"\xff"', b'"\xed\xa0\x80"', rb'"\ud834"', b'"\\x"']),
        ({"type": "string", "maxLength": 2}, [b'"\\n\\n"', "\"日本\"".encode()], [b'"\\n\\n\\n"', b'"abc"']),
        ({"type": "integer", "multipleOf": 7}, [b"0", b"14", b"-7", b"7000000"], [b"1", b"15", b"014"]),
        ({"type": "number", "exclusiveMinimum": 0}, [b"0.1", b"7", b"0.000001"], [b"0", b"0.0", b"-1", b"01", b"1."]),
        ({"type": "object", "maxProperties": 1}, [b"{}", b'{"a":1}'], [b'{"a":1,"b":1}']),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1, "additionalProperties": False}, [b'{"a":[{}]}', b'{"b":1}', b'{"a":1,"b":2}'], [b"{}", b'{"c":1}', b'{,"b":1}']),
        ({"type": "array", "prefixItems": [{"type": "null"}], "minItems": 2, "maxItems": 3}, [b"[null,1]", b"[null,1,2]"], [b"[null]", b"[1,1]", b"[null,1,2,3]"]),
        ({"const": {"a": [1, "x"]}}, [b'{"a":[1,"x"]}', b'{ "a": [1, "x"] }'], [b'{"a":[1]}', b"{}"]),
        ({"items": False}, [b"[]", b"1"], [b"[1]"]),
    ],
)  # fmt: skip
def test_what_is_compiled_is_enforced(value: Any, good: list[bytes], bad: list[bytes]) -> None:
    assert [passes(value, text) for text in good] == [True] * len(good)
    assert [passes(value, text) for text in bad] == [False] * len(bad)


def test_masks_inside_strings_are_those_of_accept() -> None:
    """Rows of states inside strings are computed from lengths; each bit must agree with ``accept``."""
    backend = LMFormatEnforcerBackend(LMFormatEnforcerConfig(), WITH_WORDS)
    rng = random.Random(0)
    for value in ({"type": "string"}, {"type": "string", "minLength": 2, "maxLength": 4}, {"type": "array", "items": {"type": "string", "maxLength": 5}}, {"type": "object", "properties": {"ab": {"type": "null"}}}):  # fmt: skip
        grammar = backend.compile(schema(value))
        for _ in range(20):
            matcher, row = grammar.matcher(), np.zeros((1, 10), np.int32)
            for _ in range(12):
                matcher.fill_bitmask(row, 0)
                bits = np.unpackbits(row.view(np.uint8), bitorder="little")
                allowed = set(map(int, np.flatnonzero(bits)))
                for token in range(320):
                    accepted = matcher.accept(token)
                    assert accepted == (token in allowed), (value, token)
                    if accepted:
                        matcher.rollback(1)
                token = rng.choice([t for t in allowed if t > 256] or sorted(allowed))
                if token == EOS:
                    break
                matcher.accept(token)


def test_rows_and_steps_are_forgotten_and_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recursive grammar has the same masks, no matter how few steps and rows are cached."""
    monkeypatch.setattr(automaton, "MAX_STEPS", 10)
    text = b'{"a": [[{"b": ["x", {"c": null}]}], 1.5e3]}'
    spec = GrammarSpec(GrammarKind.JSON_OBJECT)
    small = LMFormatEnforcerBackend(LMFormatEnforcerConfig(cache_bytes=0), CONTEXT).compile(spec)
    assert small.num_bytes < BACKEND.compile(spec).num_bytes
    one, other = small.matcher(), BACKEND.compile(spec).matcher()
    rows = np.zeros((2, 9), np.int32)
    for byte in text:
        one.fill_bitmask(rows, 0)
        other.fill_bitmask(rows, 1)
        assert (rows[0] == rows[1]).all()
        assert one.accept(byte)
        assert other.accept(byte)
    assert one.is_terminated
    one.rollback(len(text))
    assert one.accept(text[0])


@pytest.mark.parametrize("pattern", ["(a{1000}){1000}", "(" * 3000, "(a?){100000}"], ids=lambda text: text[:20])
def test_a_hostile_regex_is_refused_by_check(pattern: str) -> None:
    start = time.process_time()
    with pytest.raises(GrammarError):
        BACKEND.check(GrammarSpec(GrammarKind.REGEX, pattern))
    assert time.process_time() - start < 1


def test_refusals_name_the_keyword() -> None:
    for spec, keyword in ((schema({"uniqueItems": True}), "uniqueItems"), (GrammarSpec(GrammarKind.LARK, 'start: "a"'), "lark")):  # fmt: skip
        with pytest.raises(GrammarError) as caught:
            BACKEND.check(spec)
        assert caught.value.keyword == keyword


def test_integers_between_bounds() -> None:
    rng = random.Random(0)
    for _ in range(100):
        low, high = sorted(rng.randint(-1200, 1200) for _ in range(2))
        bounds = rng.choice([(low, high), (None, high), (low, None)])
        start = Automaton(json_numbers.integer(*bounds), {}).start
        for value in [*range(-1300, 1300, 13), low, high, low - 1, high + 1, 0, 1, -1]:
            inside = (bounds[0] is None or value >= low) and (bounds[1] is None or value <= high)
            state = start.follow(str(value).encode())
            assert (state is not None and state.ends) == inside, (bounds, value)


def test_decimals_between_bounds() -> None:
    rng = random.Random(0)
    for _ in range(150):
        scale = rng.choice([1, 10, 1000, 10**6])
        low, high = sorted(rng.sample(range(-3 * scale, 3 * scale), 2))
        first, last = rng.choice([(low, high), (None, high), (low, None)])
        above, below = (rng.random() < 0.5 and bound is not None for bound in (first, last))
        ends = [None if bound is None else Fraction(repr(bound / scale)) for bound in (first, last)]
        start = Automaton(json_numbers.number(ends[0], ends[1], above=above, below=below), {}).start
        for _ in range(100):
            digits = rng.randint(0, 6)
            value = rng.choice([low / scale, high / scale, rng.uniform(-4, 4)]) + rng.choice([0, 1, -1]) * 10**-digits
            text = f"{value:.{digits}f}"
            number = float(text)
            if text.startswith("-") and number == 0:
                continue
            inside = all(
                [
                    first is None or number > low / scale or (number == low / scale and not above),
                    last is None or number < high / scale or (number == high / scale and not below),
                ]
            )
            state = start.follow(text.encode())
            assert (state is not None and state.ends) == inside, (first, last, above, below, text)


def test_utf8_of_ranges() -> None:
    rng = random.Random(0)
    for _ in range(40):
        low = rng.choice([0, 0x41, 0x7F, 0x80, 0x7FF, 0x800, 0xE000, 0xFFFF, 0x10000, rng.randrange(0xD000)])
        high = min(low + rng.choice([0, 1, 63, 64, 5000]), 0xD7FF if low < 0xD800 else 0x10FFFF)
        found = list(encoded(low, high))
        for code in [low, high, *(rng.randrange(0x110000) for _ in range(200))]:
            if 0xD800 <= code < 0xE000:
                continue
            data = chr(code).encode()
            hits = [
                s for s in found if len(s) == len(data) and all(a <= b <= c for (a, c), b in zip(s, data, strict=True))
            ]
            assert len(hits) == (low <= code <= high)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "covered_at_least"), [(suite_schemas, 0.5), pytest.param(real_schemas, 0.7, marks=pytest.mark.full)]
)
def test_no_invalid_instance_passes(cases: Any, covered_at_least: float) -> None:
    folder = os.environ.get("GRAMMAR_CORPORA")
    if not folder:
        pytest.skip("GRAMMAR_CORPORA is not set to the folder of the JSON Schema Test Suite and the real schemas")
    checker = CorpusChecker(BACKEND, lambda text: list(text.encode()), 257, EOS)
    verdicts = [checker.check(case) for case in cases(Path(folder))]
    assert not [verdict.false_accepts for verdict in verdicts if verdict.false_accepts]
    assert sum(verdict.covered for verdict in verdicts) >= covered_at_least * len(verdicts)


def test_the_work_of_a_mask_is_bounded_and_what_was_reached_stays_right() -> None:
    spec = GrammarSpec(GrammarKind.REGEX, ".*a.{200}")
    free = LMFormatEnforcerBackend(LMFormatEnforcerConfig(max_work=10**9), WITH_WORDS).compile(spec).matcher()
    tight = LMFormatEnforcerBackend(LMFormatEnforcerConfig(max_work=20_000), WITH_WORDS).compile(spec).matcher()
    rows = np.zeros((2, 10), np.int32)
    raised = ""
    while not raised:
        free.fill_bitmask(rows, 0)
        try:
            tight.fill_bitmask(rows, 1)
        except GrammarError as error:
            raised = str(error)
            break
        assert (rows[0] == rows[1]).all()
        assert free.accept(ord("a"))
        assert tight.accept(ord("a"))
    assert "more than 20000 positions" in raised
    assert "max_work" in raised
    tight.rollback(2)
    free.rollback(2)
    for matcher, row in ((free, 0), (tight, 1)):
        matcher.fill_bitmask(rows, row)
    assert (rows[0] == rows[1]).all(), "a mask that was remembered"
