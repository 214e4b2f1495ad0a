"""The xgrammar backend. Run: python -m pytest -q tests/plugins/test_grammar_xgrammar.py"""

from __future__ import annotations

from dovetail.testing.grammar import GrammarSuite


class TestXGrammar(GrammarSuite):
    name = "xgrammar"
