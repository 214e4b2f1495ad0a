"""Read and check the constraints of requests, in the same way for every backend."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from dovetail.errors import GrammarError
from dovetail.sampling_params import GrammarKind, GrammarSpec
from dovetail_grammar.patterns import checked, size, whole
from dovetail_grammar.regex_parser import Node, PatternError, parse

MAX_PATTERN = 20_000
"""Maximum number of characters of a regex with its repetitions written out."""
MAX_CHOICES = 10_000


def read_json(spec: GrammarSpec) -> Any:
    """Return the parsed JSON text of a constraint. Raises ``GrammarError``."""
    try:
        return json.loads(spec.text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise GrammarError(f"the {spec.kind} is not valid JSON: {error}", param=spec.kind) from error
    except RecursionError as error:
        raise GrammarError(f"the JSON of the {spec.kind} is nested too deeply", param=spec.kind) from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def read_regex(spec: GrammarSpec, most: int = MAX_PATTERN) -> Node:
    """Return the pattern of a regex that the whole output must match. ``most`` is the maximum number of its characters
    with repetitions written out. Raises ``GrammarError``."""
    try:
        node = checked(whole(parse(spec.text), search=False))
    except (PatternError, RecursionError) as error:
        construct = error.construct if isinstance(error, PatternError) else "nesting"
        raise GrammarError(f"the regex is not supported: {error}", param=spec.kind, keyword=construct) from error
    if size(node) > most:
        raise GrammarError(
            f"the regex has {size(node)} characters with its repetitions written out; allowed: {most}",
            param=spec.kind,
            keyword="size",
        )
    return node


def read_choice(spec: GrammarSpec) -> list[str]:
    """Return the texts of a choice, without duplicates. Raises ``GrammarError``."""
    texts = read_json(spec)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise GrammarError(f"a choice is a JSON array of texts that is not empty and contains no empty text; given: {spec.text[:80]}", param=spec.kind)  # fmt: skip
    if len(texts) > MAX_CHOICES:
        raise GrammarError(f"the choice has {len(texts)} texts; allowed: {MAX_CHOICES}", param=spec.kind)
    return list(dict.fromkeys(texts))


@dataclass(frozen=True, slots=True)
class Structure:
    """Describe a structure in free text: ``begin``, then a JSON value of ``schema``, then ``end``. ``trigger`` is the
    trigger that ``begin`` starts with."""

    begin: str
    schema: Any
    end: str
    trigger: str


def read_tags(spec: GrammarSpec) -> tuple[list[Structure], list[str]]:
    """Return the structures and triggers of a structural tag. Raises ``GrammarError``."""
    value = read_json(spec)
    given: Any = value if isinstance(value, dict) else {}
    items, triggers = given.get("structures"), given.get("triggers")
    if not _filled(items, dict) or not _filled(triggers, str) or not all(triggers):
        raise GrammarError(
            'a structural tag is {"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}, neither list empty; '
            f"given: {spec.text[:80]}",
            param=spec.kind,
        )
    triggers = list(dict.fromkeys(triggers))
    structures = [_structure(item, triggers) for item in items]
    if unused := [trigger for trigger in triggers if all(s.trigger != trigger for s in structures)]:
        raise GrammarError(f"no structure begins with the trigger {unused[0]!r}, or another trigger comes first", param=spec.kind)  # fmt: skip
    return structures, triggers


def _filled(value: object, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, kind) for item in value)


def _structure(item: dict[str, Any], triggers: list[str]) -> Structure:
    begin, end = item.get("begin"), item.get("end", "")
    if not isinstance(begin, str) or not isinstance(end, str):
        raise GrammarError(
            f"'begin' and 'end' of a structure are texts; given: {begin!r}, {end!r}", param="structural_tag"
        )
    ends = {trigger: begin.find(trigger) + len(trigger) for trigger in triggers if trigger in begin}
    first = min(ends, key=lambda trigger: ends[trigger], default=None)
    if first is None or not begin.startswith(first):
        raise GrammarError(
            f"the structure that begins with {begin!r} must begin with a trigger, and must not contain another trigger that ends "
            f"before that one; triggers: {', '.join(map(repr, triggers))}",
            param=GrammarKind.STRUCTURAL_TAG,
        )
    return Structure(begin, item.get("schema", True), end, first)
