"""Define the vocabulary and the constraints of the grammar suite."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dovetail.interfaces.features import Feature
from dovetail.interfaces.grammar import GrammarContext
from dovetail.sampling_params import GrammarKind, GrammarSpec
from dovetail.testing.grammar_languages import EMPTY, Language, Nested, Star, any_char, any_of, chars, maybe, seq, times

_PIECES = [
    *("ab", "abc", "bc", "ba", "xx", "aab", "abx", "yes", "no", "yess", "12", "20", "-0", "2024-", "cc", ", b", "1,2"),
    *(
        "((",
        "))",
        "(x",
        "x)",
        "é",
        "日",
        "日本",
        "  ",
        "\n ",
        "a\n",
        '"a',
        '"a"',
        '{"',
        '":',
        '": ',
        '", "',
        '"}',
        '"]',
    ),
    *(
        '"}\n',
        "true",
        "false",
        "null",
        "red",
        '"red"',
        '{"a":',
        '"b"',
        "}}",
        "]}",
        "[[",
        "},",
        "\\u",
        '\\"',
        "1.5",
        "e5",
        "\t\t",
    ),
]
PIECES: list[bytes] = [piece.encode() for piece in _PIECES] + ["日".encode()[1:], b"\xa9", "本".encode()[:2], b"a\xe6"]
"""Tokens of several bytes, including parts of characters, and tokens that extend over the end of a structure."""

TOKEN_BYTES: list[bytes | None] = [None, None, *(bytes([i]) for i in range(256)), None, *PIECES, None]
"""Special tokens 0 (end), 1 and 258, every byte, the pieces, and finally a second end token."""

EOS = (0, len(TOKEN_BYTES) - 1)
VOCAB_SIZE = len(TOKEN_BYTES) + 71
"""The width of the logits: wider than the vocabulary, and not a multiple of 32."""


def context() -> GrammarContext:
    """Return the context that the backend under test is built for."""
    merges = {"type": "BPE", "vocab": {}, "merges": []}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": merges, "decoder": {"type": "ByteLevel"}}
    return GrammarContext(VOCAB_SIZE, TOKEN_BYTES, EOS, json.dumps(tokenizer))


FEATURES = {
    GrammarKind.JSON_SCHEMA: Feature.GRAMMAR_JSON_SCHEMA,
    GrammarKind.JSON_OBJECT: Feature.GRAMMAR_JSON_OBJECT,
    GrammarKind.REGEX: Feature.GRAMMAR_REGEX,
    GrammarKind.EBNF: Feature.GRAMMAR_EBNF,
    GrammarKind.LARK: Feature.GRAMMAR_LARK,
    GrammarKind.CHOICE: Feature.GRAMMAR_CHOICE,
    GrammarKind.STRUCTURAL_TAG: Feature.GRAMMAR_STRUCTURAL_TAG,
}


@dataclass(frozen=True, slots=True)
class ExactCase:
    """Describe a constraint whose allowed tokens are known in every state."""

    spec: GrammarSpec
    language: Language
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JsonCase:
    """Describe a constraint on JSON: ``valid`` checks a parsed value, ``texts`` must be accepted, and ``wrong`` must be
    refused."""

    spec: GrammarSpec
    valid: Callable[[Any], bool]
    texts: tuple[str, ...]
    wrong: tuple[str, ...]


def _regex(pattern: str, language: Language, *texts: str) -> ExactCase:
    return ExactCase(GrammarSpec(GrammarKind.REGEX, pattern), language, texts)


def _ebnf(grammar: str, language: Language, *texts: str) -> ExactCase:
    return ExactCase(GrammarSpec(GrammarKind.EBNF, grammar), language, texts)


def _lark(grammar: str, language: Language, *texts: str) -> ExactCase:
    return ExactCase(GrammarSpec(GrammarKind.LARK, grammar), language, texts)


def _choice(*texts: str) -> ExactCase:
    return ExactCase(GrammarSpec(GrammarKind.CHOICE, json.dumps(texts)), any_of(*texts), texts)


_DIGIT = chars("09")

FINITE: list[ExactCase] = [
    _regex("yes|no|yess", any_of("yes", "no", "yess"), "yes", "no", "yess"),
    _regex("abc|abx|ab", any_of("abc", "abx", "ab"), "abc", "abx", "ab"),
    _regex("é|日本|e|日", any_of("é", "日本", "e", "日"), "é", "日本", "日"),
]
"""Alternations of plain texts, which every backend with ``grammar.regex`` must support."""

REGULAR: list[ExactCase] = [
    _regex("[a-c]{2,3}x*", seq(times(chars("ac"), 2, 3), Star(chars("xx"))), "ab", "abcxx", "ccx"),
    _regex("(ab|a)(c|bc)*", seq(any_of("ab", "a"), Star(any_of("c", "bc"))), "a", "abc", "abbcc", "abcbc"),
    _regex("a?b?c?", seq(maybe("a"), maybe("b"), maybe("c")), "a", "abc", "bc", "ac"),
    _regex("[0-9]{4}-[01][0-9]", seq(times(_DIGIT, 4, 4), "-", chars("01"), _DIGIT), "2024-12", "1999-00"),
    _regex("^(?:x|[^ab])+c$", seq(any_char("ab"), Star(any_char("ab")), "c"), "xc", "日本c", "ccc", "\n é c"),
    _regex(r"\d+(\.\d+)?", seq(_DIGIT, Star(_DIGIT), maybe(seq(".", _DIGIT, Star(_DIGIT)))), "12", "1.5", "20.201"),
]

EBNF: list[ExactCase] = [
    _ebnf('root ::= "(" root ")" | "x"', Nested(b"(", b"x", b")"), "x", "(x)", "(((x)))"),
    _ebnf(
        'root ::= item (", " item)*\nitem ::= [0-9]+ | "b"',
        seq(
            any_of(seq(_DIGIT, Star(_DIGIT)), "b"), Star(seq(", ", any_of(seq(_DIGIT, Star(_DIGIT)), "b")))
        ),
        "12",
        "b, b, 12",
    ),
    _ebnf('root ::= "é"? ("日" | "日本")', seq(maybe("é"), any_of("日", "日本")), "日", "é日本"),
]  # fmt: skip


CHOICES: list[ExactCase] = [
    _choice("yes", "no", "yess"),
    _choice("12"),
    _choice("日本", "日", 'a\n"b\\', "[a]*", "a/b", "𝄞"),
]

LARK: list[ExactCase] = [
    _lark('start: "(" start ")" | "x"', Nested(b"(", b"x", b")"), "x", "(x)", "(((x)))"),
    _lark(
        'start: ITEM (", " ITEM)*\nITEM: /[0-9]+/ | "b"',
        seq(
            any_of(seq(_DIGIT, Star(_DIGIT)), "b"), Star(seq(", ", any_of(seq(_DIGIT, Star(_DIGIT)), "b")))
        ),
        "12",
        "b, b, 12",
    ),
]  # fmt: skip

EXACT: list[ExactCase] = [*FINITE, *REGULAR, *EBNF, *CHOICES, *LARK]
"""All constraints whose masks are known."""


@dataclass(frozen=True, slots=True)
class TextCase:
    """Describe a constraint on free text: ``texts`` must be accepted, and ``wrong`` must be refused at some point."""

    spec: GrammarSpec
    texts: tuple[str, ...]
    wrong: tuple[str, ...]


def _tags(structures: list[tuple[str, Any, str]], triggers: list[str], texts: list[str], wrong: list[str]) -> TextCase:
    items = [{"begin": begin, "schema": schema, "end": end} for begin, schema, end in structures]
    text = json.dumps({"structures": items, "triggers": triggers})
    return TextCase(GrammarSpec(GrammarKind.STRUCTURAL_TAG, text), tuple(texts), tuple(wrong))


TAGS: list[TextCase] = [
    _tags(
        [("<f=a>", {"type": "integer"}, "</f>"), ("<f=b>", {"type": "boolean"}, "</f>")],
        ["<f="],
        ["", "ab 日本", "<f", "<f=a>12</f>", "x<<f=b>true</f>y<f=a>0</f>", "<f =", "\n<f=a>-3</f>"],
        ["<f=", "<f=c>", "a<f=a>true</f>", "<f=a>12", "<f=a>12</f", "<f=a>1</f><f=b>1</f>", "b<f=b></f>"],
    ),
    _tags(
        [
            ("[call]", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, "\n"),
            ("{", True, "}"),
        ],
        ["[call]", "{"],
        ['[call]{"a":1}\n', "[call", "a{[]}b", '{"x"}[call]{"a": 2}\n'],
        ["[call]", '[call]{"a":"x"}\n', "{", "{}", "a{1}{"],
    ),
]


def _schema(schema: Any, valid: Callable[[Any], bool], texts: tuple[str, ...], wrong: tuple[str, ...]) -> JsonCase:
    return JsonCase(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)), valid, texts, wrong)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _closed(value: Any) -> bool:
    shape = isinstance(value, dict) and set(value) <= {"a", "b", "on"} and "a" in value and "on" in value
    return shape and _is_int(value["a"]) and isinstance(value.get("b", ""), str) and isinstance(value["on"], bool)


def _tree(value: Any) -> bool:
    shape = isinstance(value, dict) and set(value) <= {"v", "c"} and _is_int(value.get("v"))
    return shape and isinstance(value.get("c", []), list) and all(map(_tree, value.get("c", [])))


def _member(values: list[Any]) -> Callable[[Any], bool]:
    return lambda value: any(type(value) is type(other) and value == other for other in values)


_CLOSED = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "on": {"type": "boolean"}},
    "required": ["a", "on"],
    "additionalProperties": False,
}
_TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "c": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "required": ["v"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}

TREE = _schema(
    _TREE, _tree, ('{"v":1}', '{"v": 1, "c": [{"v": 2}, {"v": 3, "c": []}]}'), ('{"c":[]}', '{"v":1,"c":[1]}')
)
"""A schema that refers to itself."""

SCHEMAS: list[JsonCase] = [
    _schema(
        {"enum": ["red", "no", 12, None]},
        _member(["red", "no", 12, None]),
        ('"red"', "12", "null"),
        ('"re"', "1", "red", "13", "true"),
    ),
    _schema(
        _CLOSED,
        _closed,
        ('{"a":12,"on":true}', '{"a": 12, "b": "日本 \\"x\\"", "on": false}'),
        ('{"a":12}', '{"a":"12","on":true}', '{"a":1,"on":true,"c":1}', '{"a":1.5,"on":true}', "{}", "[]"),
    ),
    _schema(
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        lambda value: isinstance(value, list) and 1 <= len(value) <= 3 and all(map(_is_int, value)),
        ("[1]", "[1,2]", "[12, -20, 0]"),
        ("[]", "[1,2,3,4]", '["a"]', "[1,]", "[01]"),
    ),
    TREE,
    _schema(
        {"type": "string", "minLength": 2, "maxLength": 3},
        lambda value: isinstance(value, str) and 2 <= len(value) <= 3,
        ('"ab"', '"日本é"'),
        ('"a"', '"abcd"', "12"),
    ),
    _schema(
        {"type": "integer", "minimum": -3, "maximum": 120},
        lambda value: _is_int(value) and -3 <= value <= 120,
        ("0", "-3", "120", "99"),
        ("121", "-4", "1.5", '"1"'),
    ),
]


def _hard(schema: Any, *wrong: str) -> JsonCase:
    return _schema(schema, lambda value: True, (), wrong)


HARD: list[JsonCase] = [
    _hard({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1,1]", "[1, 2, 1]"),
    _hard({"type": "array", "contains": {"type": "string"}}, "[]", "[1]"),
    _hard({"type": "array", "not": {"items": {"type": "integer"}}}, "[]", "[1]"),
    _hard({"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}, '{"a":1}'),
    _hard({"type": "object", "dependentRequired": {"a": ["b"]}}, '{"a":1}'),
    _hard({"type": "object", "propertyNames": {"maxLength": 1}}, '{"ab":1}'),
    _hard({"type": "object", "minProperties": 2}, "{}", '{"a":1}', '{"a":1,"a":1}'),
    _hard({"type": "object", "maxProperties": 1}, '{"a":1,"b":1}'),
    _hard({"type": "object", "patternProperties": {"^a": {"type": "integer"}, "b$": {"minimum": 3}}}, '{"ab":1}'),
    _hard({"type": "object", "properties": {"a": {"type": "integer"}}}, '{"a":"x"}', '{"\\u0061":"x"}'),
    _hard({"allOf": [{"properties": {"a": {}}}, {"type": "object"}], "unevaluatedProperties": False}, '{"b":1}'),
    _hard({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]}, "3", "1.5"),
    _hard({"type": "number", "multipleOf": 0.5}, "0.25", "1.3"),
    _hard({"type": "integer", "minimum": 9007199254740993}, "9007199254740992"),
    _hard({"type": "string", "pattern": "^(?!a)"}, '"ab"'),
    _hard({"type": "string", "pattern": "^a$|b"}, '"ac"', '"a\\n"'),
    _hard({"type": "string", "format": "date"}, '"2023-02-29"', '"x"'),
    _hard({"type": "string", "format": "regex"}, '"("'),
    _hard({"enum": ["a", "bc", 1], "maxLength": 1}, '"bc"'),
    _hard({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": "integer"}}}, "2", "3.5"),
    _hard({"$ref": "https://example.com/other.json"}, "1"),
    _hard({"type": "integer", "x-guidance": {"lenient": True}, "not": {"multipleOf": 2}}, "2"),
]
"""Schemas that a backend must enforce, or refuse with a keyword."""

JSON_OBJECT = JsonCase(
    GrammarSpec(GrammarKind.JSON_OBJECT),
    lambda value: isinstance(value, dict),
    ("{}", '{"a":1.5}', '{"a": [true, null, {"b": "\\u00e9 \\" 日"}], "b": -1.5e5}'),
    ("[]", '"a"', '{"a"}', "{'a':1}", '{"a":01}', '{"a":tru}'),
)

INVALID: list[GrammarSpec] = [
    *(GrammarSpec(GrammarKind.REGEX, text) for text in ("(a", "a)", "[a", "*a", "a{3,2}", "[b-a]", "(?=a)b", r"(a)\1")),
    *(GrammarSpec(GrammarKind.EBNF, text) for text in ("", "root ::= (", "root ::= missing", 'other ::= "a"')),
    *(GrammarSpec(GrammarKind.CHOICE, text) for text in ("", "[]", '"a"', "[1]", '[""]')),
    *(GrammarSpec(GrammarKind.LARK, text) for text in ("", "start: (", "start: missing", 'other: "a"')),
    *(
        GrammarSpec(GrammarKind.STRUCTURAL_TAG, text)
        for text in ("", "{}", '{"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<b"]}')
    ),
    *(
        GrammarSpec(GrammarKind.JSON_SCHEMA, text)
        for text in ("", "{", "[]", "12", '{"type": "sometimes"}', '{"$ref": "#/missing"}', '{"enum": []}', "false")
    ),
]
"""Constraints that are invalid for every backend."""

__all__ = ["EBNF", "EMPTY", "EOS", "FEATURES", "FINITE", "INVALID", "JSON_OBJECT", "PIECES", "REGULAR", "SCHEMAS"]
