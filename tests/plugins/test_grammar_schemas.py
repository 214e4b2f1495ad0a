"""Check that JSON schemas for xgrammar are enforced completely or refused. Run: python -m pytest -q
tests/plugins/test_grammar_schemas.py

The measured part reads the JSON Schema Test Suite and real schemas from the folder in GRAMMAR_CORPORA.
"""

from __future__ import annotations

import gzip
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dovetail.errors import GrammarError
from dovetail.interfaces.grammar import GrammarContext, Matcher
from dovetail.sampling_params import GrammarKind, GrammarSpec
from dovetail_grammar.config import XGrammarConfig
from dovetail_grammar.schemas import rewrite
from dovetail_grammar.xgrammar_backend import XGrammarBackend

EOS = 256
BYTES = GrammarContext(257, [*(bytes([i]) for i in range(256)), None], (EOS,), "{}")
BACKEND = XGrammarBackend(XGrammarConfig(threads=1), BYTES)
STRICT = XGrammarBackend(XGrammarConfig(threads=1, strict=True), BYTES)


def compiled(schema: Any, backend: XGrammarBackend = BACKEND) -> Any:
    return backend.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)))


def passes(matcher: Matcher, text: str) -> bool:
    """Return true if the whole text is accepted byte by byte, and then the end."""
    return all(matcher.accept(byte) for byte in text.encode()) and matcher.accept(EOS)


def let_through(schema: Any, *texts: str, backend: XGrammarBackend = BACKEND) -> list[bool]:
    grammar = compiled(schema, backend)
    return [passes(grammar.matcher(), text) for text in texts]


INT: dict[str, Any] = {"type": "integer"}
STR: dict[str, Any] = {"type": "string"}


def obj(**keys: Any) -> dict[str, Any]:
    return {"type": "object", **keys}


ENFORCED: list[tuple[Any, list[str], list[str]]] = [
    # (schema, texts that must pass, texts that must not); each line is something xgrammar alone gets wrong
    ({**INT, "anyOf": [{"minimum": 5}, {"maximum": -5}]}, ["5", "-5"], ["0", '"x"']),
    ({"allOf": [{"minimum": 5}, INT, {"maximum": 7}]}, ["5", "7"], ["4", "8", '"x"']),
    ({"$defs": {"x": INT}, "$ref": "#/$defs/x", "minimum": 5}, ["5"], ["4", '"x"']),
    ({"$defs": {"a/b c": INT}, "$ref": "#/$defs/a~1b%20c"}, ["1"], ['"x"']),
    (obj(properties={"a": INT}, required=["z"]), ['{"a":1,"z":2}', '{"z":"x"}'], ['{"a":1}', "{}"]),
    (obj(properties={"a": INT}), ['{"a":1,"b":"x"}', '{"b":null}'], ['{"a":1,"\\u0061":"x"}', '{"a":1,"a":"x"}']),
    (obj(properties={"a": INT, "b": False}), ['{"a":1}', '{"c":1}'], ['{"b":1}']),
    (obj(unevaluatedProperties=False, properties={"a": INT}), ['{"a":1}', "{}"], ['{"b":1}']),
    (obj(patternProperties={"^x-": INT}, additionalProperties=False), ['{"x-a":1}', "{}"], ['{"x-a":""}', '{"y":1}']),
    (obj(propertyNames={"maxLength": 2}), ['{"ab":1}'], ['{"abc":1}']),
    (obj(propertyNames={"enum": ["a", "b"]}, additionalProperties=INT), ['{"a":1,"b":2}'], ['{"c":1}', '{"a":""}']),
    (obj(dependentRequired={"a": ["b"]}), ['{"b":1}', '{"a":1,"b":2}', "{}"], ['{"a":1}']),
    ({"maxItems": 1}, ["[1]", '"text"', "{}"], ["[1,2]"]),
    ({"type": "array", "prefixItems": [INT, STR, INT], "maxItems": 2}, ['[1,"a"]'], ['[1,"a",1]', "[1,2]"]),
    ({"type": "array", "items": [INT, STR], "additionalItems": False}, ['[1,"a"]', "[1]"], ['[1,"a",1]', '["a"]']),
    ({**STR, "maxLength": 2}, ['"ab"', '"日本"'], ['"abc"', '"\t"', '"\x01"']),
    ({**STR, "pattern": "b"}, ['"abc"', '"b"'], ['"ac"', '""']),
    ({**STR, "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 3}, ['"ab"', '"abc"'], ['"a"', '"abcd"']),
    ({**STR, "pattern": "^[^a]{2}$"}, ['"bc"'], ['"\\n"', '"ab"']),
    ({**STR, "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"2024-02-30"', '"2024-13-01"']),
    ({**STR, "format": "ipv4", "maxLength": 15}, ['"127.0.0.1"'], ['"256.0.0.1"', '"1.2.3"']),
    ({**STR, "format": "uuid"}, ['"2eb8aa08-aa98-11ea-b4aa-73b441d16380"'], ['"2eb8aa08"']),
    ({"type": ["integer", "string"], "enum": [1, "a", None]}, ["1", '"a"'], ["null"]),
    ({"type": "number", "multipleOf": 5}, ["10", "0"], ["7", "7.5"]),
    ({**INT, "multipleOf": 5, "minimum": 7, "maximum": 22}, ["10", "20"], ["5", "25", "11"]),
    ({**INT, "minimum": 4.5, "exclusiveMaximum": 7}, ["5", "6"], ["4", "7"]),
    ({**INT, "minimum": 4, "exclusiveMinimum": True}, ["5"], ["4"]),
    ({"oneOf": [INT, STR]}, ["1", '"a"'], ["1.5", "null"]),
    (
        {"oneOf": [obj(properties={"k": {"const": k}, "v": v}, required=["k", "v"]) for k, v in (("i", INT), ("s", STR))]},
        ['{"k":"i","v":1}', '{"k":"s","v":""}'],
        ['{"k":"i","v":""}', '{"k":"t","v":1}'],
    ),
    ({"anyOf": [{"allOf": [INT, STR]}, {"const": 5}]}, ["5"], ["4", '"x"']),
    (
        {"anyOf": [obj(properties={name: {"type": "array", "items": STR}}) for name in ("include", "exclude")]},
        ['{"include":["a"],"exclude":["b"]}', '{"include":["a"]}', '{"exclude":[]}', '{"exclude":["b"],"include":1}'],
        ['{"include":1,"exclude":2}', "[]"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), ENFORCED, ids=lambda value: json.dumps(value)[:40])
def test_what_is_compiled_is_enforced(schema: Any, good: list[str], bad: list[str]) -> None:
    assert let_through(schema, *good) == [True] * len(good)
    assert let_through(schema, *bad) == [False] * len(bad)


REFUSED: list[tuple[Any, str, str]] = [
    ({"not": INT}, "not", "#/not"),
    ({"if": INT, "then": {"minimum": 1}}, "if", "#/if"),
    (obj(properties={"a": {"type": "array", "contains": INT}}), "contains", "#/properties/a/contains"),
    ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, "uniqueItems", "#/items/uniqueItems"),
    ({"type": "number", "multipleOf": 0.01}, "multipleOf", "#/multipleOf"),
    ({**INT, "multipleOf": 3, "minimum": 1}, "multipleOf", "#/multipleOf"),
    ({"oneOf": [INT, {"type": "number"}]}, "oneOf", "#/oneOf"),
    ({"$dynamicRef": "#a"}, "$dynamicRef", "#/$dynamicRef"),
    ({"$ref": "https://example.com/x"}, "https://example.com/x", "#/$ref"),
    ({"$ref": "#/$defs/missing"}, "#/$defs/missing", "points to nothing"),
    ({"$ref": "#"}, "circular", "#"),
    ({**STR, "pattern": "^(?=a)"}, "lookaround", "#/pattern"),
    ({**STR, "pattern": "a\\b"}, "pattern", "#/pattern"),
    ({**STR, "pattern": '^"$'}, "JSON must escape", "#/pattern"),
    ({**STR, "pattern": "^a+b*$", "maxLength": 4}, "maxLength", "#/maxLength"),
    ({**STR, "format": "regex"}, "regex", "#/format"),
    (obj(properties={"xa": INT}, patternProperties={"^x": STR}), "patternProperties", "'^x' matches 'xa'"),
    (obj(patternProperties={"^x": STR, "a$": INT}), "patternProperties", "same key"),
    (obj(minProperties=2), "minProperties", "#/minProperties"),
    (obj(unevaluatedProperties=False, allOf=[obj(properties={"a": INT})]), "unevaluatedProperties", "#/unevaluated"),
    ({"allOf": [INT, STR]}, "nothing", "#"),
    (obj(required=["a"], additionalProperties=False), "nothing", "#"),
    ({"type": "text"}, "text", "#/type"),
    ({"minimum": "1"}, "minimum", "#/minimum"),
    (obj(required="a"), "required", "#/required"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "word", "place"), REFUSED, ids=lambda value: json.dumps(value)[:40])
def test_what_cannot_be_enforced_is_refused_with_its_place(schema: Any, word: str, place: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compiled(schema)
    assert word in str(caught.value)
    assert place in str(caught.value)


def test_annotations_change_nothing() -> None:
    notes = {
        "title": "T",
        "description": "d",
        "default": 5,
        "examples": [1],
        "x-order": 1,
        "format": "int32",
        "readOnly": True,
    }
    assert let_through({**INT, **notes}, "1", '"a"') == [True, False]


def test_strict_closes_what_the_schema_leaves_open() -> None:
    open_object = obj(properties={"a": INT})
    assert let_through(open_object, '{"a":1}', '{"a":1,"b":2}') == [True, True]
    assert let_through(open_object, '{"a":1}', '{"a":1,"b":2}', backend=STRICT) == [True, False]
    assert let_through(obj(), '{"b":2}', backend=STRICT) == [True]


def test_whitespace_can_be_bounded() -> None:
    bounded = XGrammarBackend(XGrammarConfig(threads=1, max_whitespace=2), BYTES)
    assert let_through({"type": "array"}, "[ \n1]", "[   1]", backend=bounded) == [True, False]


# -- measured ----------------------------------------------------------------------------------------------------------

Case = tuple[str, Any, list[tuple[bool, Any]]]


def suite_cases(folder: Path) -> Iterator[Case]:
    for file in sorted((folder / "json-schema-test-suite").glob("*.json")):
        for group in json.loads(file.read_text("utf-8")):
            name = f"{file.stem}: {group['description']}"
            yield name, group["schema"], [(test["valid"], test["data"]) for test in group["tests"]]


def real_cases(folder: Path) -> Iterator[Case]:
    with gzip.open(folder / "real-schemas.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            case = json.loads(line)
            yield case["source"], case["schema"], [(test["valid"], test["data"]) for test in case["tests"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "refused_at_most", "valid_at_least"),
    # test_grammar_corpora.py tests a sample of both in the usual run
    [(suite_cases, 0.45, 0.91), pytest.param(real_cases, 0.22, 0.96, marks=pytest.mark.full)],
)
def test_no_invalid_instance_passes(cases: Any, refused_at_most: float, valid_at_least: float) -> None:
    folder = os.environ.get("GRAMMAR_CORPORA")
    if not folder:
        pytest.skip("GRAMMAR_CORPORA is not set to the folder of the JSON Schema Test Suite and the real schemas")
    count = Counter[str]()
    false_accepts = []
    for name, schema, tests in cases(Path(folder)):
        try:
            grammar = compiled(schema)
        except GrammarError:
            count["refused"] += 1
            continue
        count["compiled"] += 1
        for valid, data in tests:
            passed = passes(grammar.matcher(), json.dumps(data, ensure_ascii=False))
            count[f"{valid=} {passed=}"] += 1
            if passed and not valid:
                false_accepts.append((name, data))
    assert not false_accepts
    assert count["refused"] <= refused_at_most * (count["refused"] + count["compiled"]), count
    right, wrong = count["valid=True passed=True"], count["valid=True passed=False"]
    assert right >= valid_at_least * (right + wrong), count


def test_long_enums_are_read_in_time_that_grows_with_their_length() -> None:
    """Each value was formerly compared with all others, so that 6,000 values took seconds."""
    values = [f"value {i}" for i in range(6000)]
    start = time.thread_time()
    written = rewrite({"enum": values, "maxLength": 9}, strict=False)
    assert time.thread_time() - start < 3
    assert written["enum"] == values[:1000]
