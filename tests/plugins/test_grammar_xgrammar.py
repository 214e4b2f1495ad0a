"""The xgrammar backend. Run: python -m pytest -q tests/plugins/test_grammar_xgrammar.py"""

from __future__ import annotations

import subprocess
import sys

import pytest

from dovetail.errors import GrammarError
from dovetail.testing.grammar import GrammarSuite
from dovetail.testing.grammar_cases import context
from dovetail.types import GrammarKind, GrammarSpec
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
    """The bytes ED A0 80 are no UTF-8: after ED the next byte stays below A0, also when it was taken back."""
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


def test_the_entry_module_is_light() -> None:
    script = "import dovetail_grammar.plugin, dovetail_grammar.config, sys; print([m for m in ('torch', 'xgrammar') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
