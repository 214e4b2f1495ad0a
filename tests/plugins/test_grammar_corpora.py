"""Test every installed grammar backend with a sample of the corpora: no invalid text may pass.

Run: GRAMMAR_CORPORA=DIR python -m pytest -q tests/plugins/test_grammar_corpora.py

DIR contains json-schema-test-suite/ and real-schemas.jsonl.gz; benchmarks/grammar.py runs all of both. The sample is as
large as a few seconds allow, in a fixed order.
"""

from __future__ import annotations

import functools
import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from dovetail.config import PluginsSection
from dovetail.interfaces.features import Feature
from dovetail.interfaces.grammar import GrammarContext
from dovetail.registry.loader import load_plugins
from dovetail.registry.specs import ComponentKind
from dovetail.registry.targets import load_attribute
from dovetail.testing.grammar_corpora import (
    CorpusChecker,
    CorpusResult,
    SchemaCase,
    in_schema_order,
    real_schemas,
    spell,
    suite_schemas,
)
from dovetail.tokenizer import Tokenizer

SECONDS = 1.0
LEAST = 6
LONGEST = 6000
TINY = Path(__file__).parents[2] / "core" / "dovetail" / "assets" / "tiny"
LOADERS = {"real": real_schemas, "suite": suite_schemas}

registry = load_plugins(PluginsSection())
ENGINES = [
    component.spec.name
    for component in registry.components(ComponentKind.GRAMMAR)
    if Feature.GRAMMAR_JSON_SCHEMA in component.spec.offers
]


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(TINY)


@functools.cache
def sample(corpus: str) -> Sequence[SchemaCase]:
    folder = os.environ.get("GRAMMAR_CORPORA")
    if not folder:
        pytest.skip("GRAMMAR_CORPORA is not set to the folder of the JSON Schema Test Suite and the real schemas")
    cases = [case for case in LOADERS[corpus](Path(folder)) if len(case.schema) < LONGEST]
    return random.Random(corpus).sample(cases, len(cases))


def checker(engine: str) -> CorpusChecker:
    tokens = tokenizer()
    component = registry.get(ComponentKind.GRAMMAR, engine)
    config = registry.config_class(ComponentKind.GRAMMAR, engine).model_validate({"kind": engine})
    context = GrammarContext(tokens.vocab_size, tokens.token_bytes, tokens.eos_token_ids, tokens.json)
    backend = load_attribute(component.spec.target, component.label)(config, context)
    encode = functools.partial(tokens.encode, add_special_tokens=False)
    return CorpusChecker(backend, encode, tokens.vocab_size, tokens.eos_token_ids[0], masks=False)


@pytest.mark.parametrize("corpus", list(LOADERS))
@pytest.mark.parametrize("engine", ENGINES)
def test_no_invalid_instance_passes(engine: str, corpus: str) -> None:
    cases = sample(corpus)
    bench, verdicts = checker(engine), list[CorpusResult]()
    start = time.monotonic()
    for case in cases:
        if len(verdicts) >= LEAST and time.monotonic() - start > SECONDS:
            break
        verdicts.append(bench.check(case))
        assert not verdicts[-1].false_accepts, f"{case.name}: {verdicts[-1].false_accepts} of {case.schema}"
    passed, blocked = sum(v.passed for v in verdicts), sum(len(v.blocked) for v in verdicts)
    assert passed >= 0.85 * (passed + blocked)


ORDERED = {
    "properties": {"b": {"$ref": "#/$defs/n"}, "a": {}},
    "anyOf": [{"properties": {"x": {}, "a": {}}}, {"required": ["z"]}],
    "$defs": {"n": {"items": {"properties": {"q": {}, "p": {}}}}},
}


def test_keys_are_spelled_in_the_order_of_the_schema() -> None:
    data = json.loads('{"other": 1, "z": 2, "a": 3, "x": 4, "b": [{"p": 1, "q": 2}]}')
    assert list(in_schema_order(ORDERED, data)) == ["b", "x", "a", "z", "other"]
    assert list(in_schema_order(ORDERED, data)["b"][0]) == ["q", "p"]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (1.0, "1"),
        (1e-7, "0.0000001"),
        (1e300, "1e+300"),
        (0.1, "0.1"),
        (True, "true"),
        ({"é\n": [None]}, '{"é\\n":[null]}'),
    ],
)
def test_values_are_spelled_plainly(data: object, text: str) -> None:
    assert spell(data, (",", ":")) == text
    assert json.loads(text) == data
