"""Test the llguidance backend. Run: python -m pytest -q tests/plugins/test_grammar_llguidance.py"""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import numpy as np
import pytest

from dovetail.errors import GrammarError
from dovetail.interfaces.grammar import GrammarContext
from dovetail.sampling_params import GrammarKind, GrammarSpec
from dovetail.testing.grammar import GrammarSuite
from dovetail.testing.grammar_cases import EOS, TOKEN_BYTES, VOCAB_SIZE, context
from dovetail_grammar.config import LLGuidanceConfig
from dovetail_grammar.llguidance_backend import LLGuidanceBackend, LLGuidanceMatcher


class TestLLGuidance(GrammarSuite):
    name = "llguidance"


@pytest.mark.parametrize(
    ("kind", "text", "message", "keyword"),
    [
        (GrammarKind.EBNF, 'root ::= ""', "only the empty text", None),
        (GrammarKind.EBNF, 'root ::= root "a"', "no text", None),
        (GrammarKind.EBNF, "root ::= (", "never closed", None),
        (GrammarKind.EBNF, 'root ::= "\\q"', "not known", None),
        (GrammarKind.EBNF, "root ::= " + "(" * 3000, "recursion", None),
        (GrammarKind.REGEX, "(" * 3000, "not supported", "nesting"),
        (GrammarKind.REGEX, r"[^\s\S]", "matches nothing", None),
        (GrammarKind.REGEX, "(a{1000}){1000}", "allowed: 20000", "size"),
        (GrammarKind.CHOICE, "[]", "not empty", None),
        (GrammarKind.CHOICE, '["a", 1]', "array of texts", None),
        (GrammarKind.LARK, "start: (", "llguidance cannot compile", None),
        (GrammarKind.LARK, 'start: %json {"uniqueItems": true}', "uniqueItems", "uniqueItems"),
        (GrammarKind.LARK, '%llguidance {"allow_invalid_utf8": true}\nstart: "a"', "not allowed", None),
        (GrammarKind.STRUCTURAL_TAG, '{"structures": [], "triggers": ["<"]}', "neither list empty", None),
        (
            GrammarKind.STRUCTURAL_TAG,
            '{"structures": [{"begin": "a"}], "triggers": ["<"]}',
            "begin with a trigger",
            None,
        ),
        (GrammarKind.JSON_SCHEMA, "[" * 100_000, "nested", None),
        (GrammarKind.JSON_SCHEMA, '{"items":' * 500 + "{}" + "}" * 500, "nested", "nesting"),
        (GrammarKind.JSON_SCHEMA, '{"minimum": NaN}', "NaN", None),
        (GrammarKind.JSON_SCHEMA, '{"minimum": 1e999}', "reasonable size", None),
        (GrammarKind.JSON_SCHEMA, '{"minimum": 9007199254740993}', "digits", "minimum"),
        (GrammarKind.JSON_SCHEMA, '{"not": {"items": {"type": "string"}}}', "not", "not"),
        (GrammarKind.JSON_SCHEMA, '{"x-guidance": {"lenient": true}, "contains": {}}', "contains", "contains"),
        (GrammarKind.JSON_SCHEMA, '{"pattern": "(?=a)"}', "look", "pattern"),
        (GrammarKind.JSON_SCHEMA, '{"format": "regex"}', "format", "format"),
        (GrammarKind.JSON_SCHEMA, '{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "oneOf", "oneOf"),
        (GrammarKind.JSON_SCHEMA, '{"type": "object", "minProperties": 2}', "minProperties", "minProperties"),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "other.json"}', "ref", "$ref"),
    ],
)
def test_refusals_say_why_and_name_the_keyword(kind: GrammarKind, text: str, message: str, keyword: str | None) -> None:
    with pytest.raises(GrammarError, match=message) as caught:
        backend().compile(GrammarSpec(kind, text))
    assert caught.value.keyword == keyword
    assert caught.value.param


def backend() -> LLGuidanceBackend:
    return LLGuidanceBackend(LLGuidanceConfig(threads=1), context())


def passes(kind: GrammarKind, constraint: Any, text: str | bytes) -> bool:
    """Return true if the text is accepted byte by byte and may end."""
    written = constraint if isinstance(constraint, str) else json.dumps(constraint)
    matcher = backend().compile(GrammarSpec(kind, written)).matcher()
    data = text if isinstance(text, bytes) else text.encode()
    return all(matcher.accept(TOKEN_BYTES.index(bytes([byte]))) for byte in data) and matcher.accept(EOS[0])


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"properties": {"a": {"type": "integer"}}}, ['{"a":1}', '{"b":"x"}'], ['{"a":"x"}', '{"\\u0061":"x"}']),
        ({"patternProperties": {"^a": {"type": "integer"}}}, ['{"ab":1}'], ['{"ab":"x"}', '{"\\u0061b":"x"}']),
        ({"type": "string", "pattern": "^.$"}, ['"a"'], ['"\u2028"', '"\\r"', '"\\n"']),
        ({"type": "string", "pattern": r"^\s$"}, ['" "', '"\ufeff"'], ['"\x85"']),
        ({"type": "string", "format": "time"}, ['"23:59:59Z"'], ['"12:59:60Z"', '"10:00:00"']),
        ({"type": "string", "format": "json-pointer"}, ['"/a~1"', '""'], ['"a"', '"/~2"']),
        ({"type": "string", "format": "int32"}, ['"x"'], ["1"]),
        ({"dependentRequired": {"a": ["b"]}}, ['{"a":1,"b":2}', '{"b":1}', "3"], ['{"a":1}']),
        ({"minimum": 5, "exclusiveMinimum": True}, ["6", '"a"'], ["5"]),
        ({"items": [{"type": "integer"}], "additionalItems": False}, ["[1]", "[]"], ["[1,2]", '["a"]']),
        ({"propertyNames": {"pattern": "^a"}}, ['{"ab":1}', "{}"], ['{"b":1}']),
        ({"$ref": "#/x/y", "x": {"y": {"const": 3, "type": "integer"}}}, ["3"], ["4"]),
        ({"x-guidance": {"item_separator": ";"}, "type": "array"}, ["[1,2]"], ["[1;2]"]),
        ({"type": "integer", "maximum": 2**64}, ["9"], ["9.5"]),
    ],
)
def test_schemas_mean_what_json_schema_says(schema: Any, valid: list[str], invalid: list[str]) -> None:
    for text in valid:
        assert passes(GrammarKind.JSON_SCHEMA, schema, text), text
    for text in invalid:
        assert not passes(GrammarKind.JSON_SCHEMA, schema, text), text


GBNF = 'root ::= pair | "[" ws root ws "]" # nested\npair ::= [a-z]+ "=" ("ab" "cd" | "abce" | "\\u00e9" | [^a-y"\\\\\\]]{2,3})\nws ::= [ \\t]*'


@pytest.mark.parametrize("text", ["x=abcd", "[ xy=abce\t]", "[[a=é]]", "a=zz", "a=-_]"[:4]])
def test_gbnf_lets_through_what_it_describes(text: str) -> None:
    assert passes(GrammarKind.EBNF, GBNF, text)


@pytest.mark.parametrize("text", ["x=abc", "x=abcdx", "[x=abce", "a=z", "a=zzzz", "=abcd", 'a=z"'])
def test_gbnf_stops_everything_else(text: str) -> None:
    assert not passes(GrammarKind.EBNF, GBNF, text)


def test_a_batch_is_filled_like_single_rows() -> None:
    """Include matchers that have ended, and matchers whose mask is known."""
    engine = backend()
    compiled = engine.compile(GrammarSpec(GrammarKind.REGEX, "ab?"))
    matchers = [compiled.matcher() for _ in range(4)]
    letter = TOKEN_BYTES.index
    assert matchers[1].accept(letter(b"a"))
    assert matchers[2].accept(letter(b"a"))
    assert not matchers[2].is_terminated
    assert matchers[3].accept(letter(b"ab"))
    assert matchers[3].accept(EOS[0])
    bitmask = np.full((6, -(-VOCAB_SIZE // 32)), -7, np.int32)
    engine.fill_bitmasks(matchers, bitmask, [4, 3, 2, 1])
    assert (bitmask[[0, 5]] == -7).all()
    for matcher, row in zip(matchers, [4, 3, 2, 1], strict=True):
        alone = np.zeros((1, bitmask.shape[1]), np.int32)
        matcher.fill_bitmask(alone, 0)
        assert (alone[0] == bitmask[row]).all()


def test_a_text_that_is_too_complex_raises_and_lets_nothing_end() -> None:
    limited = LLGuidanceBackend(LLGuidanceConfig(threads=1, max_items=1000), context())
    grammar = "root ::= s\ns ::= s s | s s s | [a-z] | [a-m] s [a-z]"
    matcher = limited.compile(GrammarSpec(GrammarKind.EBNF, grammar)).matcher()
    with pytest.raises(GrammarError, match="too complex"):
        write_as(matcher, 2000)
    assert not matcher.accept(EOS[0])


def write_as(matcher: LLGuidanceMatcher, count: int) -> None:
    row = np.zeros((1, -(-VOCAB_SIZE // 32)), np.int32)
    for _ in range(count):
        assert matcher.accept(TOKEN_BYTES.index(b"a"))
        matcher.fill_bitmask(row, 0)


def test_hostile_constraints_end_soon() -> None:
    hostile = [
        (GrammarKind.REGEX, "((a?){30}){30}(a){30}"),
        (GrammarKind.JSON_SCHEMA, json.dumps({"allOf": [{"anyOf": [{"type": "object", "required": [f"k{i}{j}"]} for j in range(6)]} for i in range(12)]})),
        (GrammarKind.JSON_SCHEMA, json.dumps({"enum": [str(i) for i in range(20_000)]})),
        (GrammarKind.EBNF, "root ::= " + " | ".join(f'"{i}"' for i in range(5000))),
        (GrammarKind.EBNF, "root ::= a{1000}\na ::= b{1000}\nb ::= [a-z]{1000}"),
    ]  # fmt: skip
    for kind, text in hostile:
        start = time.process_time()
        with contextlib.suppress(GrammarError):
            backend().compile(GrammarSpec(kind, text))
        assert time.process_time() - start < 5, text[:60]


def test_two_tokens_of_one_text_are_both_allowed() -> None:
    tokens = [None, b"a", b"ab", b"a", b"b", b"\xff", None]
    engine = LLGuidanceBackend(LLGuidanceConfig(threads=1), GrammarContext(40, tokens, (0,), "{}"))
    matcher = engine.compile(GrammarSpec(GrammarKind.REGEX, "ab")).matcher()
    row = np.zeros((1, 2), np.int32)
    matcher.fill_bitmask(row, 0)
    assert row[0].tolist() == [0b1110, 0]
    assert matcher.accept(3)
    assert matcher.accept(4)
    assert matcher.is_terminated


def test_too_many_members_at_one_place_are_refused_before_a_request_runs() -> None:
    """llguidance limits the number of members that may come next, which takes effect when it accepts the first token."""
    schema = {"properties": {f"member {i}": {"type": "integer"} for i in range(900)}, "additionalProperties": False}
    with pytest.raises(GrammarError, match="too much open") as caught:
        backend().compile(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps({"type": "object", **schema})))
    assert caught.value.keyword == "size"


def test_a_vocabulary_without_a_token_that_ends_outputs_is_refused() -> None:
    """So that ``auto`` asks the next backend, which may do without one."""
    backend = LLGuidanceBackend(LLGuidanceConfig(), GrammarContext(3, (b"a", b"b", b"c"), (), ""))
    for call in (backend.check, backend.compile):
        with pytest.raises(GrammarError, match="the model has none") as caught:
            call(GrammarSpec(GrammarKind.REGEX, "a+"))
        assert caught.value.keyword == "regex"
