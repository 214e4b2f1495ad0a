"""The conformance suite of grammar backends must fail on backends that are wrong.

Run: python -m pytest -q tests/plugins/test_grammar_suite.py
"""

from __future__ import annotations

import numpy as np
import pytest

from dovetail.errors import GrammarError
from dovetail.interfaces.grammar import GrammarBackend
from dovetail.testing.grammar import GrammarSuite
from dovetail.testing.grammar_cases import (
    EBNF,
    EOS,
    FINITE,
    INVALID,
    REGULAR,
    SCHEMAS,
    TOKEN_BYTES,
    VOCAB_SIZE,
    context,
)
from dovetail.testing.grammar_languages import Language, any_char, any_of, follow
from dovetail.types import GrammarSpec, IntArray
from dovetail_grammar.config import XGrammarConfig
from dovetail_grammar.xgrammar_backend import XGrammarBackend, XGrammarCompiled, XGrammarMatcher


class AllowsOneMore(XGrammarMatcher):
    """An unsound mask: a token that leads nowhere is allowed too."""

    def fill_bitmask(self, bitmask: IntArray, row: int) -> None:
        super().fill_bitmask(bitmask, row)
        bitmask[row, 270 // 32] |= np.int32(1 << (270 % 32))


class ForbidsOneMore(XGrammarMatcher):
    """An incomplete mask: the longest of the allowed tokens is missing."""

    def fill_bitmask(self, bitmask: IntArray, row: int) -> None:
        super().fill_bitmask(bitmask, row)
        allowed = [i for i, data in enumerate(TOKEN_BYTES) if data and bitmask[row, i // 32] >> (i % 32) & 1]
        if len(allowed) > 1:
            worst = max(allowed, key=lambda i: len(TOKEN_BYTES[i] or b""))
            bitmask[row, worst // 32] &= ~np.int32(1 << (worst % 32)) if worst % 32 < 31 else np.int32(0x7FFFFFFF)


class RollsBackOneLess(XGrammarMatcher):
    """Off by one."""

    def rollback(self, num_tokens: int) -> None:
        super().rollback(max(num_tokens - 1, 0))


class EndsAnywhere(XGrammarMatcher):
    """The end is allowed in every state."""

    def fill_bitmask(self, bitmask: IntArray, row: int) -> None:
        super().fill_bitmask(bitmask, row)
        bitmask[row] |= self._tokens.eos


class NeverEnds(XGrammarMatcher):
    """Only an end token terminates, also where nothing else may follow."""

    @property
    def is_terminated(self) -> bool:
        return self._handle.is_terminated()


class LeavesThePadding(XGrammarMatcher):
    """Bits beyond the vocabulary are set."""

    def fill_bitmask(self, bitmask: IntArray, row: int) -> None:
        super().fill_bitmask(bitmask, row)
        bitmask[row, -1] = -1


class LeavesWords(XGrammarMatcher):
    """Words without allowed tokens are not written."""

    def fill_bitmask(self, bitmask: IntArray, row: int) -> None:
        before = bitmask[row].copy()
        super().fill_bitmask(bitmask, row)
        bitmask[row] = np.where(bitmask[row] == 0, before, bitmask[row])


class WritesTheNextRow(XGrammarMatcher):
    """A row too many."""

    def fill_bitmask(self, bitmask: IntArray, row: int) -> None:
        super().fill_bitmask(bitmask, row)
        bitmask[(row + 1) % len(bitmask)] = bitmask[row]


class AcceptsAnything(XGrammarMatcher):
    """What is forbidden is skipped, and said to be accepted."""

    def accept(self, token_id: int) -> bool:
        super().accept(token_id)
        return True


class JumpsTooFar(XGrammarMatcher):
    """A text that need not come."""

    def jump_forward(self) -> str:
        return super().jump_forward() + "x"


class Broken(XGrammarBackend):
    """Hands out matchers of another class."""

    matchers: type[XGrammarMatcher] = XGrammarMatcher

    def compile(self, spec: GrammarSpec) -> XGrammarCompiled:
        compiled = super().compile(spec)
        make = self.matchers

        class Compiled(XGrammarCompiled):
            def matcher(self) -> XGrammarMatcher:
                return make(self._compiled, self._tokens)

        return Compiled(compiled._compiled, compiled._tokens)


class SharesOneMatcher(XGrammarBackend):
    """All requests of one grammar share their state."""

    def compile(self, spec: GrammarSpec) -> XGrammarCompiled:
        compiled = super().compile(spec)
        only = compiled.matcher()
        compiled.matcher = lambda: only  # type: ignore[method-assign]
        return compiled


class RefusesNothing(XGrammarBackend):
    """What it cannot read becomes anything."""

    def compile(self, spec: GrammarSpec) -> XGrammarCompiled:
        try:
            return super().compile(spec)
        except GrammarError:
            return super().compile(REGULAR[2].spec)


def suite(backend: type[GrammarBackend]) -> GrammarSuite:
    class Suite(GrammarSuite):
        name = "xgrammar"

        def make(self) -> GrammarBackend:
            return backend(XGrammarConfig(threads=1), context())

    return Suite()


def with_matchers(matchers: type[XGrammarMatcher]) -> GrammarSuite:
    return suite(type(matchers.__name__, (Broken,), {"matchers": matchers}))


EXACT = "test_masks_are_exact_along_random_texts"


@pytest.mark.parametrize(
    ("matchers", "test", "case"),
    [
        (AllowsOneMore, EXACT, FINITE[1]),
        (AllowsOneMore, "test_every_allowed_token_leads_to_valid_json", SCHEMAS[1]),
        (ForbidsOneMore, EXACT, FINITE[1]),
        (ForbidsOneMore, "test_valid_texts_pass_in_every_tokenization", FINITE[0]),
        (RollsBackOneLess, "test_rollback_is_replay", REGULAR[0]),
        (EndsAnywhere, EXACT, EBNF[0]),
        (EndsAnywhere, "test_invalid_json_is_stopped", SCHEMAS[0]),
        (NeverEnds, "test_the_end", FINITE[0]),
        (LeavesThePadding, EXACT, REGULAR[0]),
        (LeavesWords, EXACT, REGULAR[0]),
        (WritesTheNextRow, EXACT, REGULAR[0]),
        (AcceptsAnything, "test_accept_agrees_with_the_mask", REGULAR[0]),
        (AcceptsAnything, "test_the_end_is_refused_before_it", REGULAR[0]),
        (JumpsTooFar, "test_jump_forward_says_what_must_come", FINITE[0]),
    ],
    ids=lambda value: getattr(value, "__name__", None) or (value if isinstance(value, str) else ""),
)
def test_a_broken_matcher_fails(matchers: type[XGrammarMatcher], test: str, case: object) -> None:
    getattr(with_matchers(XGrammarMatcher), test)(case)
    with pytest.raises(AssertionError):
        getattr(with_matchers(matchers), test)(case)


def test_a_shared_state_fails() -> None:
    with pytest.raises(AssertionError):
        suite(SharesOneMatcher).test_matchers_of_one_grammar_are_independent(REGULAR[0])


def test_refusing_nothing_fails() -> None:
    with pytest.raises(BaseException, match="DID NOT RAISE"):
        suite(RefusesNothing).test_refuses_invalid_constraints(INVALID[0])


def test_the_oracle_knows_utf8_and_ends() -> None:
    state: Language | None = any_char('"')
    for text, whole in [("é", True), ("日", True), ("𝄞", True), ('"', False), ("ab", False)]:
        left = follow(state, text.encode())
        assert (left is not None and left.ends) == whole
    for wrong in (b"\xed\xa0\x80", b"\xc0\x80", b"\xff", b"\xf4\x90\x80\x80", b"\xe0\x80\x80"):
        assert follow(state, wrong) is None
    left = follow(any_of("ab", "abc"), b"ab")
    assert left is not None
    assert left.ends
    assert follow(left, b"c") is not None
    assert follow(left, b"d") is None


def test_the_vocabulary_is_as_hard_as_it_says() -> None:
    assert VOCAB_SIZE % 32
    assert len(TOKEN_BYTES) < VOCAB_SIZE
    assert all(TOKEN_BYTES[token] is None for token in EOS)
    singles = {data for data in TOKEN_BYTES if data and len(data) == 1}
    assert len(singles) == 256
