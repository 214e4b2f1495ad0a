"""The lm_format_enforcer backend. Run: python -m pytest -q tests/plugins/test_grammar_lm_format_enforcer.py"""

from __future__ import annotations

from dovetail.testing.grammar import GrammarSuite


class TestLMFormatEnforcer(GrammarSuite):
    name = "lm_format_enforcer"
