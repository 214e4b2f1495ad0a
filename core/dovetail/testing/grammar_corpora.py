"""Check a grammar backend with corpora of JSON schemas and their valid and invalid instances.

A backend must accept every valid instance, token by token, and refuse every invalid one, unless it refuses the schema.
Backends fix what JSON leaves open, so an instance is written in several ways: with keys as given, or in the order in
which the schema names them; compact, or with a space after each comma and colon. Numbers are written without an
exponent if that takes at most 20 digits, and integers without a fraction. Strings are written without escapes that JSON
does not require. A valid instance is accepted if one order of keys passes with both conventions of whitespace. An
invalid instance is refused if no way of writing it passes.
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
    """Hold a JSON value: ``orders[k][w]`` is its text with the k-th order of keys and the w-th convention of
    whitespace."""

    valid: bool
    orders: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class SchemaCase:
    """Hold a schema with its instances. ``group`` is the part of the corpus that contains it."""

    name: str
    group: str
    schema: str
    instances: tuple[Instance, ...]


@dataclass(slots=True)
class CorpusResult:
    """Hold the result of one backend for one case.

    ``refused`` is the message and ``keyword`` the keyword of a refusal. ``compile`` and ``fills`` are times in seconds.
    ``passed`` counts the valid instances that were accepted, and ``stopped`` the invalid ones that were refused.
    ``blocked`` has the valid texts that were refused, and ``false_accepts`` the invalid texts that were accepted.
    """

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
        """Return true if the schema was compiled, every valid instance accepted and every invalid one refused."""
        return not (self.refused or self.timed_out or self.blocked or self.false_accepts)


def suite_schemas(folder: Path) -> Iterator[SchemaCase]:
    """Yield the JSON Schema Test Suite in ``folder``/json-schema-test-suite."""
    for file in sorted((folder / "json-schema-test-suite").glob("*.json")):
        for group in json.loads(file.read_text("utf-8")):
            tests = [(test["valid"], test["data"]) for test in group["tests"]]
            yield _case(f"{file.stem}: {group['description']}", file.stem, group["schema"], tests)


def real_schemas(folder: Path) -> Iterator[SchemaCase]:
    """Yield the schemas in ``folder``/real-schemas.jsonl.gz."""
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
    """Return the JSON text of ``data`` under the conventions of this module."""
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
    """Return ``data`` with its keys in the order in which the schema names them.

    The names of ``properties`` come first, then those of ``required``. The names of the schema itself come first, and
    those of its parts are merged into them. Keys that the schema does not name come last, in their own order.
    """
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
    """Merge names into an order: each new name is inserted before the first name of ``order`` that comes after it in
    ``names``."""
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
    """Yield the schema and every part of it that applies to the same value."""
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
class CorpusChecker:
    """Run cases on one backend.

    ``encode`` is the tokenizer's function, ``width`` the size of the vocabulary, and ``end`` an end token. With
    ``masks``, every token's mask is filled, timed and compared with ``accept``. Without it, only ``accept`` decides.
    """

    backend: GrammarBackend
    encode: Encode
    width: int
    end: int
    masks: bool = True

    def check(self, case: SchemaCase) -> CorpusResult:
        """Compile the schema and try every instance. Errors other than ``GrammarError`` in ``compile`` are raised."""
        result = CorpusResult()
        start = time.perf_counter()
        try:
            grammar = self.backend.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, case.schema))
        except GrammarError as error:
            result.refused, result.keyword = str(error), error.keyword
            return result
        finally:
            result.compile = time.perf_counter() - start
        for instance in case.instances:
            self._try(grammar, instance, result)
        return result

    def _try(self, grammar: CompiledGrammar, instance: Instance, result: CorpusResult) -> None:
        if instance.valid:
            good = any(all(self._passes(grammar, text, result) for text in order) for order in instance.orders)
            result.passed += good
            result.blocked += [] if good else [instance.orders[-1][0]]
            return
        wrong = [text for order in instance.orders for text in order if self._passes(grammar, text, result)]
        result.stopped += not wrong
        result.false_accepts += wrong[:1]

    def _passes(self, grammar: CompiledGrammar, text: str, result: CorpusResult) -> bool:
        """Return true if the mask (or ``accept``) allows each token of the text, and its end."""
        matcher = grammar.matcher()
        mask = np.zeros((1, -(-self.width // 32)), np.int32)
        for token in [*self.encode(text), self.end]:
            if not self.masks:
                if not matcher.accept(token):
                    return False
                continue
            start = time.perf_counter()
            matcher.fill_bitmask(mask, 0)
            result.fills.append(time.perf_counter() - start)
            allowed = bool(mask[0, token // 32] >> (token % 32) & 1)
            assert matcher.accept(token) == allowed, f"accept({token}) and the mask disagree in {text!r}"
            if not allowed:
                return False
        return True
