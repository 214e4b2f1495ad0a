"""Corpora of JSON schemas with valid and invalid instances: the judge of a grammar backend.

A backend must let every valid instance through, token by token, and stop every invalid one, unless it refused the schema.
Engines fix what JSON leaves open, so an instance is spelled in several ways: keys as given, or in the order in which the
schema names them; compact, or with a space after each comma and colon. Numbers are spelled without exponent where that
takes no more than 20 digits, integers without fraction; strings without escapes that JSON does not demand. A valid
instance is let through if one order of keys passes under both conventions of whitespace; an invalid one is stopped if
no spelling passes.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.errors import GrammarError
from dovetail.interfaces.grammar import CompiledGrammar, GrammarBackend
from dovetail.sampling_params import GrammarKind, GrammarSpec

Encode = Callable[[str], list[int]]
COMPACT, SPACED = (",", ":"), (", ", ": ")
_DIGITS = 20
_HOPS = 40


@dataclass(frozen=True, slots=True)
class Instance:
    """A JSON value. ``orders[k][w]`` is its text with the k-th order of keys and the w-th convention of whitespace."""

    valid: bool
    orders: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class SchemaCase:
    """A schema with its instances. ``group`` is the part of the corpus that it is from."""

    name: str
    group: str
    schema: str
    instances: tuple[Instance, ...]


@dataclass(slots=True)
class Verdict:
    """What one backend made of one case. Times are seconds."""

    refused: str | None = None
    keyword: str | None = None
    timed_out: bool = False
    compile: float = 0.0
    fills: list[float] = field(default_factory=list[float])
    passed: int = 0
    stopped: int = 0
    blocked: list[str] = field(default_factory=list[str])
    false_accepts: list[str] = field(default_factory=list[str])

    @property
    def covered(self) -> bool:
        """True if the schema was compiled, every valid instance let through and every invalid one stopped."""
        return not (self.refused or self.timed_out or self.blocked or self.false_accepts)


def suite_schemas(folder: Path) -> Iterator[SchemaCase]:
    """The JSON Schema Test Suite in ``folder``/json-schema-test-suite."""
    for file in sorted((folder / "json-schema-test-suite").glob("*.json")):
        for group in json.loads(file.read_text("utf-8")):
            tests = [(test["valid"], test["data"]) for test in group["tests"]]
            yield _case(f"{file.stem}: {group['description']}", file.stem, group["schema"], tests)


def real_schemas(folder: Path) -> Iterator[SchemaCase]:
    """The schemas in ``folder``/real-schemas.jsonl.gz."""
    with gzip.open(folder / "real-schemas.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            tests = [(test["valid"], test["data"]) for test in row["tests"]]
            yield _case(row["source"], row["group"], row["schema"], tests)


def _case(name: str, group: str, schema: Any, tests: list[tuple[bool, Any]]) -> SchemaCase:
    instances = tuple(Instance(valid, _orders(schema, data)) for valid, data in tests)
    return SchemaCase(name, group, json.dumps(schema), instances)


def _orders(schema: Any, data: Any) -> tuple[tuple[str, str], ...]:
    given = (spell(data, COMPACT), spell(data, SPACED))
    sorted_ = in_schema_order(schema, data)
    return tuple(dict.fromkeys([given, (spell(sorted_, COMPACT), spell(sorted_, SPACED))]))


def spell(data: Any, separators: tuple[str, str]) -> str:
    """The JSON text of ``data`` under the conventions above."""
    comma, colon = separators
    if isinstance(data, dict):
        parts = [_string(str(key)) + colon + spell(value, separators) for key, value in data.items()]
        return "{" + comma.join(parts) + "}"
    if isinstance(data, list):
        return "[" + comma.join(spell(value, separators) for value in data) + "]"
    if isinstance(data, str):
        return _string(data)
    return _number(data) if isinstance(data, float) else json.dumps(data)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=any(0xD800 <= ord(char) < 0xE000 for char in text))


def _number(value: float) -> str:
    if value.is_integer() and abs(value) < 10**_DIGITS:
        return str(int(value))
    text = format(Decimal(repr(value)), "f")
    return text if len(text) <= _DIGITS + 2 else repr(value)


def in_schema_order(schema: Any, data: Any) -> Any:
    """``data`` with its keys in the order in which the schema names them: ``properties``, then ``required``, first those of
    the schema itself, then those of its parts, woven into them; keys without a name stay behind in their order."""
    return _ordered([schema], data, schema)


def _ordered(schemas: Sequence[Any], data: Any, root: Any) -> Any:
    parts = [part for schema in schemas for part in _applied(schema, root, 0)]
    if isinstance(data, list):
        return [_ordered(_items(parts, index), value, root) for index, value in enumerate(data)]
    if not isinstance(data, dict):
        return data
    named: list[str] = []
    for part in parts:
        _weave(named, [*_mapping(part, "properties"), *_names(part)])
    rank = {name: index for index, name in enumerate(named)}
    keys = sorted(data, key=lambda key: rank.get(key, len(named)))
    return {key: _ordered(_values(parts, key), data[key], root) for key in keys}


def _weave(order: list[str], names: list[str]) -> None:
    """Add names to an order: each new one before the first of ``order`` that comes after it in ``names``."""
    new: list[str] = []
    for name in dict.fromkeys(names):
        if name in order:
            index = order.index(name)
            order[index:index] = new
            new = []
        else:
            new.append(name)
    order += new


def _applied(schema: Any, root: Any, hops: int) -> Iterator[dict[str, Any]]:
    """The schema and every part of it that speaks of the same value."""
    if not isinstance(schema, dict) or hops > _HOPS:
        return
    yield schema
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref.startswith("#"):
        yield from _applied(_target(root, ref[1:]), root, hops + 1)
    for key in ("allOf", "anyOf", "oneOf"):
        for part in schema.get(key) or ():
            yield from _applied(part, root, hops + 8)
    for key in ("then", "else"):
        yield from _applied(schema.get(key), root, hops + 8)


def _target(root: Any, pointer: str) -> Any:
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        root = root.get(key) if isinstance(root, dict) else None
    return root


def _mapping(part: dict[str, Any], key: str) -> dict[str, Any]:
    value = part.get(key)
    return value if isinstance(value, dict) else {}


def _names(part: dict[str, Any]) -> list[str]:
    value = part.get("required")
    return value if isinstance(value, list) else []


def _values(parts: list[dict[str, Any]], key: str) -> list[Any]:
    found = [part["properties"][key] for part in parts if key in _mapping(part, "properties")]
    return found + [value for part in parts for value in (*_mapping(part, "patternProperties").values(), part.get("additionalProperties"))]  # fmt: skip


def _items(parts: list[dict[str, Any]], index: int) -> list[Any]:
    lists = [part[key] for part in parts for key in ("prefixItems", "items") if isinstance(part.get(key), list)]
    return [items[index] for items in lists if index < len(items)] + [part.get("items") for part in parts]


@dataclass(slots=True)
class Judge:
    """Tries cases on one backend. ``encode`` is the tokenizer's, ``width`` the vocabulary's, ``end`` an end token. With
    ``masks`` every token's mask is filled, timed and compared with ``accept``, which alone decides without."""

    backend: GrammarBackend
    encode: Encode
    width: int
    end: int
    masks: bool = True

    def judge(self, case: SchemaCase) -> Verdict:
        """Compile the schema and try every instance. Errors other than refusals are raised."""
        verdict = Verdict()
        start = time.perf_counter()
        try:
            grammar = self.backend.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, case.schema))
        except GrammarError as error:
            verdict.refused, verdict.keyword = str(error), error.keyword
            return verdict
        finally:
            verdict.compile = time.perf_counter() - start
        for instance in case.instances:
            self._try(grammar, instance, verdict)
        return verdict

    def _try(self, grammar: CompiledGrammar, instance: Instance, verdict: Verdict) -> None:
        if instance.valid:
            good = any(all(self._passes(grammar, text, verdict) for text in order) for order in instance.orders)
            verdict.passed += good
            verdict.blocked += [] if good else [instance.orders[-1][0]]
            return
        wrong = [text for order in instance.orders for text in order if self._passes(grammar, text, verdict)]
        verdict.stopped += not wrong
        verdict.false_accepts += wrong[:1]

    def _passes(self, grammar: CompiledGrammar, text: str, verdict: Verdict) -> bool:
        """True if the mask allows each token of the text, and its end."""
        matcher = grammar.matcher()
        mask = np.zeros((1, -(-self.width // 32)), np.int32)
        for token in [*self.encode(text), self.end]:
            if not self.masks:
                if not matcher.accept(token):
                    return False
                continue
            start = time.perf_counter()
            matcher.fill_bitmask(mask, 0)
            verdict.fills.append(time.perf_counter() - start)
            allowed = bool(mask[0, token // 32] >> (token % 32) & 1)
            assert matcher.accept(token) == allowed, f"accept({token}) and the mask disagree in {text!r}"
            if not allowed:
                return False
        return True
