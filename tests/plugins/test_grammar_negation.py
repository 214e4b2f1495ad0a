"""Test schemas that are rewritten without not, if and oneOf. Run: python -m pytest -q
tests/plugins/test_grammar_negation.py

The reference is ``instances.satisfies``, which is itself compared with the JSON Schema Test Suite if GRAMMAR_CORPORA is
set.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from dovetail.errors import GrammarError
from dovetail_grammar.instances import UndecidedError, satisfies
from dovetail_grammar.negation import NegationError, exclusive, negate, without_not
from dovetail_grammar.schema_documents import SchemaDocument

VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, 3, -1.5, 2.5, 1e9, "", "a", "ab", "b", "é", [], [1], ["a", 2], [1, 2, 3], {}),
    *({"a": 1}, {"a": "a"}, {"b": 2}, {"a": 1, "b": "x"}, {"a": None, "c": []}, {"a": {"a": 1}}),
]
SCHEMAS: list[Any] = [
    True,
    False,
    {},
    {"type": "string"},
    {"type": ["number", "null"]},
    {"enum": ["a", None, True]},
    {"enum": [1, 2.5, "ab"]},
    {"const": False},
    {"minLength": 1, "maxLength": 1},
    {"minimum": 1, "exclusiveMaximum": 3},
    {"exclusiveMinimum": 1, "maximum": 2.5},
    {"minItems": 1, "maxItems": 2},
    {"minProperties": 1, "maxProperties": 1},
    {"required": ["a", "b"]},
    {"properties": {"a": {"type": "number"}, "b": {"type": "string"}}},
    {"prefixItems": [{"type": "number"}, {"const": 2}]},
    {"type": "object", "properties": {"a": {"properties": {"a": {"const": 1}}, "required": ["a"]}}, "required": ["a"]},
    {"allOf": [{"minLength": 1}, {"type": "string"}]},
    {"anyOf": [{"type": "string"}, {"required": ["a"]}]},
    {"oneOf": [{"required": ["a"]}, {"required": ["b"]}, {"minLength": 2}]},
    {"not": {"required": ["a"]}},
    {"dependentRequired": {"a": ["b"]}},
    {"if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": {"required": ["b"]}},
    {"if": {"type": "string"}, "then": {"minLength": 1}, "else": {"type": "number"}},
    {"if": {"type": "string"}, "else": {"minimum": 1}},
    {"$ref": "#/$defs/x", "$defs": {"x": {"type": "object", "required": ["a"]}}},
]


def decide(value: Any, schema: Any) -> bool:
    document = SchemaDocument(schema)
    return satisfies(value, schema, lambda part: document.resolve(part, "#"))


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_the_negation_allows_what_the_schema_does_not(schema: Any) -> None:
    document = SchemaDocument(schema)
    opposite = negate(schema, lambda part: document.resolve(part, "#"))
    rooted = {**opposite, "$defs": schema.get("$defs", {})} if isinstance(opposite, dict) else opposite
    for value in VALUES:
        assert decide(value, rooted) != decide(value, schema), value


@pytest.mark.parametrize(("a", "b"), list(itertools.combinations([s for s in SCHEMAS[3:] if "$ref" not in s], 2)))
def test_one_of_is_exactly_one(a: Any, b: Any) -> None:
    document = SchemaDocument(True)
    written = exclusive([a, b], lambda part: document.resolve(part, "#"))
    for value in VALUES:
        assert decide(value, written) == (decide(value, a) != decide(value, b)), value


def test_a_conditional_means_its_branches() -> None:
    schema: dict[str, Any] = {"if": {"type": "string"}, "then": {"minLength": 2}, "else": {"type": "null"}}
    written = without_not(schema, lambda part: SchemaDocument(True).resolve(part, "#"))
    assert "if" not in json.dumps(written)
    assert [value for value in VALUES if decide(value, written)] == [None, "ab"]


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "integer"}, "type"),
        ({"pattern": "a"}, "pattern"),
        ({"items": {"type": "string"}}, "items"),
        ({"additionalProperties": False}, "additionalProperties"),
        ({"enum": [[1]]}, "enum"),
        ({"uniqueItems": True}, "uniqueItems"),
        ({"properties": {"a": {"format": "date"}}}, "format"),
    ],
)
def test_what_has_no_opposite_is_named(schema: Any, keyword: str) -> None:
    with pytest.raises(NegationError, match=keyword):
        negate(schema, lambda part: SchemaDocument(True).resolve(part, "#"))


def test_the_reference_agrees_with_the_test_suite() -> None:
    folder = os.environ.get("GRAMMAR_CORPORA")
    if not folder:
        pytest.skip("GRAMMAR_CORPORA is not set to the folder of the JSON Schema Test Suite")
    judged = 0
    for file in (Path(folder) / "json-schema-test-suite").glob("*.json"):
        for group in json.loads(file.read_text("utf-8")) if file.stem not in ("format", "vocabulary") else ():
            for test in group["tests"]:
                try:
                    found = decide(test["data"], group["schema"])
                except (GrammarError, UndecidedError):
                    continue
                judged += 1
                assert found == test["valid"], (group["schema"], test["data"])
    assert judged > 500
