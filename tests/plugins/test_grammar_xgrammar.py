"""Test the xgrammar backend. Run: python -m pytest -q tests/plugins/test_grammar_xgrammar.py"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.errors import GrammarError
from dovetail.interfaces.grammar import GrammarContext
from dovetail.registry.samples import for_grammar
from dovetail.sampling_params import GrammarKind, GrammarSpec
from dovetail.testing.grammar import GrammarSuite
from dovetail.testing.grammar_cases import context
from dovetail_grammar.config import XGrammarConfig
from dovetail_grammar.xgrammar_backend import XGrammarBackend
from dovetail_grammar.xgrammar_vocabulary import separated


class TestXGrammar(GrammarSuite):
    name = "xgrammar"


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (GrammarKind.EBNF, 'root ::= ""', "only the empty text"),
        (GrammarKind.EBNF, 'root ::= root "a"', "no text"),
        (GrammarKind.EBNF, "root ::= (", "Expect"),
        (GrammarKind.EBNF, "root ::= " + "(" * 3000, "Nest layer"),
        (GrammarKind.REGEX, "a" * 4000, "allowed: 3000"),
        (GrammarKind.REGEX, "(" * 3000, "not supported"),
        (GrammarKind.REGEX, r"[^\s\S]", "matches nothing"),
        (GrammarKind.JSON_SCHEMA, "[" * 100_000, "JSON"),
        (GrammarKind.JSON_SCHEMA, '{"items":' * 500 + "{}" + "}" * 500, "nested"),
        (GrammarKind.JSON_SCHEMA, '{"minimum": NaN}', "NaN"),
        (GrammarKind.JSON_SCHEMA, '{"minimum": 1e999}', "reasonable size"),
    ],
)
def test_refusals_say_why(kind: GrammarKind, text: str, message: str) -> None:
    backend = XGrammarBackend(XGrammarConfig(threads=1), context())
    with pytest.raises(GrammarError, match=message) as caught:
        backend.compile(GrammarSpec(kind, text))
    assert "/project/cpp" not in str(caught.value)
    assert caught.value.param


def test_a_token_never_spells_half_of_a_surrogate() -> None:
    """The bytes ED A0 80 are not valid UTF-8: after ED the next byte must be below A0, also after a rollback."""
    matcher = (
        XGrammarBackend(XGrammarConfig(threads=1), context())
        .compile(GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type":"string"}'))
        .matcher()
    )
    first, quote, lead, wrong, right = 2, 2 + ord('"'), 2 + 0xED, 2 + 0xA0, 2 + 0x80
    assert first + ord('"') == quote
    for _ in range(2):
        assert matcher.accept(quote)
        assert matcher.accept(lead)
        assert not matcher.accept(wrong)
        assert matcher.accept(right)
        matcher.rollback(3)


WORDS = st.text("ab", min_size=2, max_size=4).map(str.encode)


def masks_and_accept_agree(backend: XGrammarBackend, spec: GrammarSpec, ids: Mapping[bytes, int], text: bytes) -> bool:
    """Follow ``text`` byte by byte. Return whether, before each byte, the mask allows the tokens with which the rest
    begins and only if they are accepted."""
    matcher = backend.compile(spec).matcher()
    row = np.zeros((1, -(-(max(ids.values()) + 1) // 32)), np.int32)
    for at in range(len(text)):
        matcher.fill_bitmask(row, 0)
        for end in range(at + 1, len(text) + 1):
            token = ids.get(text[at:end])
            if token is None:
                continue
            accepted = matcher.accept(token)
            if not accepted or not row[0, token // 32] >> (token % 32) & 1:
                return False
            matcher.rollback(1)
        assert matcher.accept(ids[text[at : at + 1]])
    return True


@settings(max_examples=100)
@given(st.lists(WORDS, min_size=2, max_size=8), WORDS, st.integers(0, 2))
def test_masks_allow_every_token_that_is_accepted(words: list[bytes], more: bytes, spare: int) -> None:
    """Tokens that contain another one are not skipped with it, whether or not there are ids for separators."""
    tokens = [b"", *dict.fromkeys([b"a", b"b", *words]), *[b""] * spare]
    backend = XGrammarBackend(XGrammarConfig(threads=1), GrammarContext(len(tokens), tuple(tokens), (0,), ""))
    usable = separated([b"", *tokens[1:]], {0}).texts
    assert spare < 2 or usable == tokens, "no token is given up"
    ids = {text: token for token, text in enumerate(usable) if text}
    for text in {b"".join(words) + more, more + b"".join(reversed(words))}:
        assert masks_and_accept_agree(backend, GrammarSpec(GrammarKind.CHOICE, json.dumps([text.decode()])), ids, text)


def test_a_token_that_contains_the_one_before_it_is_allowed() -> None:
    """In the embedded model's vocabulary, "eed" is sorted after "ed", and the mask after "guarant" lacked it."""
    found = for_grammar()
    ids = {text: token for token, text in reversed(list(enumerate(found.token_bytes))) if text}
    assert {b"ed", b"eed"} <= ids.keys()
    schema = GrammarSpec(
        GrammarKind.JSON_SCHEMA, '{"properties": {"guaranteedWork": {}}, "additionalProperties": false}'
    )
    backend = XGrammarBackend(XGrammarConfig(threads=1), found)
    assert masks_and_accept_agree(backend, schema, ids, b'{"guaranteedWork": "guaranteed"}')


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.REGEX, ".{0,300}"),
        (GrammarKind.REGEX, "a?[^0-9]{150,}"),
        (GrammarKind.JSON_SCHEMA, '{"type": "string", "pattern": "^[^0-9]{0,200}$"}'),
        (GrammarKind.EBNF, r"root ::= [^\n]{0,300}"),
    ],
)
def test_masks_of_long_repetitions_allow_what_is_accepted(kind: GrammarKind, text: str) -> None:
    words = [head + tail for head in "abcdefgh" for tail in "abcdefgh"]
    tails = (b"\n", b"\n\n", b"1", b'"', b"\xc1", b"\xff")
    tokens = [b"", *(bytes([i]) for i in range(1, 256)), *(w.encode() + tail for w in words for tail in tails)]
    backend = XGrammarBackend(XGrammarConfig(threads=1), GrammarContext(len(tokens), tuple(tokens), (0,), ""))
    matcher = backend.compile(GrammarSpec(kind, text)).matcher()
    row = np.zeros((1, -(-len(tokens) // 32)), np.int32)
    for before in b'"ab' if kind is GrammarKind.JSON_SCHEMA else b"ab":
        assert matcher.accept(before)
        matcher.fill_bitmask(row, 0)
        for token in np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))[1:].tolist():
            assert matcher.accept(token), tokens[token]
            matcher.rollback(1)


def test_the_entry_module_is_light() -> None:
    script = "import dovetail_grammar.plugin, dovetail_grammar.config, sys; print([m for m in ('torch', 'xgrammar') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
