"""The outlines backend. Run: python -m pytest -q tests/plugins/test_grammar_outlines.py"""

from __future__ import annotations

from dovetail.testing.grammar import GrammarSuite


class TestOutlines(GrammarSuite):
    name = "outlines"
    recursive = False
