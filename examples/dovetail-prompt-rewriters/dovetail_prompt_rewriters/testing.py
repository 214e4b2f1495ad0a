"""Provide the conformance suite of the kind, which checks any prompt rewriter against the interface."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import ClassVar

from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.config import Config
from dovetail.interfaces.prompts import PromptContext
from dovetail.testing.component import ComponentSuite
from dovetail_prompt_rewriters.interface import PromptRewriter
from dovetail_prompt_rewriters.kind import IDEMPOTENT, NORMALIZES, PROMPT_REWRITER

TEXTS = st.text(max_size=60) | st.lists(st.sampled_from(["a", " ", "é", "e\u0301", "ﬁ", "@", ".", "x@y.z", "\n"])).map(
    "".join
)


class PromptRewriterSuite(ComponentSuite):
    """Check a prompt rewriter. A subclass sets ``name``, and in ``examples`` the result for each of several texts."""

    kind: ClassVar = PROMPT_REWRITER
    examples: ClassVar[Mapping[str, str]] = {}

    def rewriter(self) -> PromptRewriter:
        """Return a new instance. Skips if no plugin registers the component."""
        self.registered()
        return self.build(PromptContext(Config()))

    def test_examples_are_rewritten(self) -> None:
        """Every text of ``examples`` is rewritten to the result that is given there."""
        rewriter = self.rewriter()
        assert self.examples, "give examples"
        assert {text: rewriter.rewrite(text) for text in self.examples} == self.examples

    def test_any_text_gives_a_text(self) -> None:
        """Any text is rewritten to a text that can be encoded, and an empty one stays empty."""
        rewriter = self.rewriter()

        @settings(max_examples=200, deadline=None)
        @given(TEXTS)
        def check(text: str) -> None:
            assert isinstance(rewriter.rewrite(text).encode(), bytes)

        check()
        assert rewriter.rewrite("") == ""

    def test_the_same_text_gives_the_same_result(self) -> None:
        """Two instances give the same results, regardless of the texts that they have rewritten before."""
        one, other = self.rewriter(), self.rewriter()

        @settings(max_examples=100, deadline=None)
        @given(TEXTS)
        def check(text: str) -> None:
            assert one.rewrite(text) == one.rewrite(text) == other.rewrite(text)

        check()

    def test_rewriting_twice_is_rewriting_once(self) -> None:
        """A rewriter that offers ``prompt_rewriter.idempotent`` leaves its own results unchanged."""
        rewriter = self.rewriter()
        self.require(IDEMPOTENT)

        @settings(max_examples=200, deadline=None)
        @given(TEXTS)
        def check(text: str) -> None:
            once = rewriter.rewrite(text)
            assert rewriter.rewrite(once) == once

        check()

    def test_results_are_normalized(self) -> None:
        """A rewriter that offers ``prompt_rewriter.normalizes`` returns text in form NFC or NFKC."""
        rewriter = self.rewriter()
        self.require(NORMALIZES)

        @settings(max_examples=200, deadline=None)
        @given(TEXTS)
        def check(text: str) -> None:
            assert unicodedata.is_normalized("NFC", rewriter.rewrite(text))

        check()
