"""Test the xgrammar backend. Run: python -m pytest -q tests/plugins/test_grammar_xgrammar.py"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from dovetail.errors import GrammarError
from dovetail.interfaces.grammar import GrammarContext
from dovetail.sampling_params import GrammarKind, GrammarSpec
from dovetail.testing.grammar import GrammarSuite
from dovetail.testing.grammar_cases import context
from dovetail_grammar.config import XGrammarConfig
from dovetail_grammar.xgrammar_backend import XGrammarBackend


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
    backend = XGrammarBackend(XGrammarConfig(threads=1), GrammarContext(len(tokens), tuple(tokens), (0,), None))
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
