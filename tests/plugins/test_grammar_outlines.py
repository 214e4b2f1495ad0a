"""Test the outlines backend. Run: python -m pytest -q tests/plugins/test_grammar_outlines.py

The measured part reads the JSON Schema Test Suite and real schemas from the folder in GRAMMAR_CORPORA.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.errors import GrammarError
from dovetail.interfaces.grammar import GrammarContext
from dovetail.sampling_params import GrammarKind, GrammarSpec
from dovetail.testing.grammar import GrammarSuite
from dovetail.testing.grammar_corpora import CorpusChecker, real_schemas, suite_schemas
from dovetail_grammar.config import OutlinesConfig
from dovetail_grammar.outlines_backend import OutlinesBackend

EOS = 256
CONTEXT = GrammarContext(257, [*(bytes([i]) for i in range(256)), None], (EOS,), "{}")
BACKEND = OutlinesBackend(OutlinesConfig(), CONTEXT)


@pytest.mark.sample(2)
class TestOutlines(GrammarSuite):
    name = "outlines"
    recursive = False


def passes(spec: GrammarSpec, text: str, backend: OutlinesBackend = BACKEND) -> bool:
    matcher = backend.compile(spec).matcher()
    return all(matcher.accept(byte) for byte in text.encode()) and matcher.accept(EOS)


def schema(value: Any) -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(value))


def regex(text: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, text)


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("a(bc)?", ["a", "abc"], ["ab", "", "abcbc"]),  # the engine drops b after an end, but for the \z
        ("a?b?", ["", "a", "b", "ab"], ["ba"]),
        ("[^a]*é", ["é", "日é", "\0é"], ["aé", "\U0010ffffé"]),
        ("\\x00x", ["\0x"], ["x"]),
    ],
)
def test_ends_and_the_sign_a_regex_begins_with(pattern: str, good: list[str], bad: list[str]) -> None:
    assert all(passes(regex(pattern), text) for text in good)
    assert not any(passes(regex(pattern), text) for text in bad)


HOSTILE = [
    "(a{1000}){1000}",
    "(a|b)*a(a|b){30}",
    "(a?b?){2000}",
    "([^a]?[^b]?){400}",
    "(" * 3000,
    "((a{100}){100}){100}",
]


@pytest.mark.parametrize("pattern", HOSTILE, ids=lambda text: text[:20])
def test_a_hostile_regex_is_refused_soon(pattern: str) -> None:
    start = time.process_time()
    with pytest.raises(GrammarError):
        BACKEND.compile(regex(pattern))
    assert time.process_time() - start < 10


def test_check_refuses_without_compiling() -> None:
    for spec in (regex(HOSTILE[0]), schema({"uniqueItems": True}), GrammarSpec(GrammarKind.EBNF, 'root ::= "a"')):
        start = time.process_time()
        with pytest.raises(GrammarError) as caught:
            BACKEND.check(spec)
        assert caught.value.keyword
        assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("value", "keyword"),
    [
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}, "$ref"),
        ({"type": "integer", "multipleOf": 7}, "multipleOf"),
        ({"type": "string", "maxLength": 100_000}, "size"),
    ],
)
def test_what_no_regex_says_is_refused_with_its_keyword(value: Any, keyword: str) -> None:
    with pytest.raises(GrammarError) as caught:
        BACKEND.compile(schema(value))
    assert caught.value.keyword == keyword


def test_the_index_is_bounded_by_the_vocabulary_too() -> None:
    small = OutlinesBackend(OutlinesConfig(max_transitions=1000), CONTEXT)
    assert passes(regex("[a-z]{3}"), "abc", small)
    with pytest.raises(GrammarError, match="max_transitions"):
        small.compile(regex("[^a]{20}"))


def test_what_the_schema_leaves_open_is_as_deep_as_the_config_says() -> None:
    texts = ["1", "[1]", "[[1]]"]
    for depth in (0, 1, 2):
        backend = OutlinesBackend(OutlinesConfig(open_depth=depth), CONTEXT)
        assert [passes(schema({}), text, backend) for text in texts] == [i <= depth for i in range(3)]


def test_a_row_is_written_in_place() -> None:
    matcher = BACKEND.compile(regex("[ab]")).matcher()
    bitmask = np.full((3, 9), -1, np.int32)
    matcher.fill_bitmask(bitmask, 1)
    assert (bitmask[[0, 2]] == -1).all()
    assert bitmask[1, 3] == 0b110
    assert not bitmask[1, [0, 1, 2, 4, 5, 6, 7, 8]].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "compiled_at_least"),
    [(suite_schemas, 0.5), pytest.param(real_schemas, 0.5, marks=[pytest.mark.full, pytest.mark.timeout(1200)])],
)
def test_no_invalid_instance_passes(cases: Any, compiled_at_least: float) -> None:
    folder = os.environ.get("GRAMMAR_CORPORA")
    if not folder:
        pytest.skip("GRAMMAR_CORPORA is not set to the folder of the JSON Schema Test Suite and the real schemas")
    checker = CorpusChecker(BACKEND, lambda text: list(text.encode()), 257, EOS)
    verdicts = [checker.check(case) for case in cases(Path(folder))]
    assert not [verdict.false_accepts for verdict in verdicts if verdict.false_accepts]
    assert sum(verdict.refused is None for verdict in verdicts) >= compiled_at_least * len(verdicts)
