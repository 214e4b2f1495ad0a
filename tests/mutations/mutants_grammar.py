"""Define broken grammar backends: xgrammar's backend with one fault each."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from mutant import Mutant, Suite

from dovetail.errors import GrammarError
from dovetail.interfaces.grammar import CompiledGrammar, GrammarBackend, Matcher
from dovetail.sampling_params import GrammarSpec
from dovetail.testing.grammar import GrammarSuite
from dovetail.testing.grammar_cases import (
    EBNF,
    FINITE,
    HARD,
    INVALID,
    REGULAR,
    SCHEMAS,
    TAGS,
    TOKEN_BYTES,
    context,
)
from dovetail.types import IntArray
from dovetail_grammar.config import XGrammarConfig
from dovetail_grammar.xgrammar_backend import XGrammarBackend, XGrammarCompiled, XGrammarMatcher


class AllowsOneMore(XGrammarMatcher):
    """Fill an unsound mask, which also allows a token that leads nowhere."""

    def fill_bitmask(self, bitmask: IntArray, row: int) -> None:
        super().fill_bitmask(bitmask, row)
        bitmask[row, 270 // 32] |= np.int32(1 << (270 % 32))


class ForbidsOneMore(XGrammarMatcher):
    """Fill an incomplete mask, which lacks the longest of the allowed tokens."""

    def fill_bitmask(self, bitmask: IntArray, row: int) -> None:
        super().fill_bitmask(bitmask, row)
        allowed = [i for i, data in enumerate(TOKEN_BYTES) if data and bitmask[row, i // 32] >> (i % 32) & 1]
        if len(allowed) > 1:
            worst = max(allowed, key=lambda i: len(TOKEN_BYTES[i] or b""))
            bitmask[row, worst // 32] &= ~np.int32(1 << (worst % 32)) if worst % 32 < 31 else np.int32(0x7FFFFFFF)


class RollsBackOneLess(XGrammarMatcher):
    """Roll back one token less."""

    def rollback(self, num_tokens: int) -> None:
        super().rollback(max(num_tokens - 1, 0))


class EndsAnywhere(XGrammarMatcher):
    """Allow the end in every state."""

    def fill_bitmask(self, bitmask: IntArray, row: int) -> None:
        super().fill_bitmask(bitmask, row)
        bitmask[row] |= self._tokens.eos


class NeverEnds(XGrammarMatcher):
    """Terminate only after an end token, even if nothing else may follow."""

    @property
    def is_terminated(self) -> bool:
        return self._handle.is_terminated()


class LeavesThePadding(XGrammarMatcher):
    """Set bits beyond the vocabulary."""

    def fill_bitmask(self, bitmask: IntArray, row: int) -> None:
        super().fill_bitmask(bitmask, row)
        bitmask[row, -1] = -1


class LeavesWords(XGrammarMatcher):
    """Do not write words without allowed tokens."""

    def fill_bitmask(self, bitmask: IntArray, row: int) -> None:
        before = bitmask[row].copy()
        super().fill_bitmask(bitmask, row)
        bitmask[row] = np.where(bitmask[row] == 0, before, bitmask[row])


class WritesTheNextRow(XGrammarMatcher):
    """Write one row too many."""

    def fill_bitmask(self, bitmask: IntArray, row: int) -> None:
        super().fill_bitmask(bitmask, row)
        bitmask[(row + 1) % len(bitmask)] = bitmask[row]


class AcceptsAnything(XGrammarMatcher):
    """Ignore forbidden tokens, and report that they were accepted."""

    def accept(self, token_id: int) -> bool:
        super().accept(token_id)
        return True


class JumpsTooFar(XGrammarMatcher):
    """Return a text that is not forced."""

    def jump_forward(self) -> str:
        return super().jump_forward() + "x"


class Broken(XGrammarBackend):
    """Return matchers of another class."""

    matchers: type[XGrammarMatcher] = XGrammarMatcher

    def compile(self, spec: GrammarSpec) -> XGrammarCompiled:
        compiled = super().compile(spec)
        make = self.matchers

        class Compiled(XGrammarCompiled):
            def matcher(self) -> XGrammarMatcher:
                return make(self._compiled, self._tokens)

        return Compiled(compiled._compiled, compiled._tokens)


class SharesOneMatcher(XGrammarBackend):
    """Share one state between all requests of a grammar."""

    def compile(self, spec: GrammarSpec) -> XGrammarCompiled:
        compiled = super().compile(spec)
        only = compiled.matcher()
        compiled.matcher = lambda: only  # type: ignore[method-assign]
        return compiled


class RefusesNothing(XGrammarBackend):
    """Compile a fixed regex instead of a constraint that it refuses."""

    def compile(self, spec: GrammarSpec) -> XGrammarCompiled:
        try:
            return super().compile(spec)
        except GrammarError:
            return super().compile(REGULAR[2].spec)


class AllowsEverything(XGrammarMatcher):
    """Allow every token."""

    def fill_bitmask(self, bitmask: IntArray, row: int) -> None:
        bitmask[row] = -1

    def accept(self, token_id: int) -> bool:
        super().accept(token_id)
        return True


class CompilesTheLatest(XGrammarBackend):
    """Store the constraint that is being compiled in the backend."""

    latest: GrammarSpec

    def compile(self, spec: GrammarSpec) -> XGrammarCompiled:
        self.latest = spec
        time.sleep(1e-3)
        return super().compile(self.latest)


class ReadsAnother(XGrammarBackend):
    """Load a fixed grammar, regardless of the bytes."""

    def load(self, data: bytes) -> CompiledGrammar:
        return self.compile(REGULAR[2].spec)


class RefusesWithoutKeyword(XGrammarBackend):
    """Refuse without a keyword."""

    def compile(self, spec: GrammarSpec) -> XGrammarCompiled:
        try:
            return super().compile(spec)
        except GrammarError as error:
            raise GrammarError(str(error)) from error


class ChecksTooMuch(XGrammarBackend):
    """Refuse constraints in ``check`` that ``compile`` accepts."""

    def check(self, spec: GrammarSpec) -> None:
        raise GrammarError("this backend would rather not", keyword="type")


def suite(backend: type[GrammarBackend]) -> Suite:
    class Suite(GrammarSuite):
        name = "xgrammar"

        def make(self) -> GrammarBackend:
            return backend(XGrammarConfig(threads=1), context())  # type: ignore[call-arg]

    return Suite


def with_matchers(matchers: type[XGrammarMatcher]) -> Suite:
    return suite(type(matchers.__name__, (Broken,), {"matchers": matchers}))


SOUND = with_matchers(XGrammarMatcher)
EXACT = "test_masks_are_exact_along_random_texts"


def _of(fault: str, part: type[Matcher] | type[GrammarBackend], case: str, *arguments: Any, says: str = "") -> Mutant:
    broken = with_matchers(part) if issubclass(part, XGrammarMatcher) else suite(part)  # type: ignore[arg-type]
    return Mutant(fault, case, broken, SOUND, [arguments], says)


MUTANTS = [
    _of(
        "allows a token that continues no valid text",
        AllowsOneMore,
        EXACT,
        FINITE[1],
        says="allowed, but leads nowhere",
    ),
    _of("forbids a valid token", ForbidsOneMore, EXACT, FINITE[1], says="forbidden, but valid"),
    _of("allows an end at any point", EndsAnywhere, EXACT, EBNF[0], says="allowed, but leads nowhere"),
    _of("allows ids beyond the vocabulary", LeavesThePadding, EXACT, REGULAR[0], says="beyond the vocabulary"),
    _of("leaves words of the mask as they were", LeavesWords, EXACT, REGULAR[0]),
    _of("writes the next row's mask", WritesTheNextRow, EXACT, REGULAR[0], says="wrote into another row"),
    _of(
        "rejects a valid text",
        ForbidsOneMore,
        "test_valid_texts_pass_in_every_tokenization",
        FINITE[0],
        says="is forbidden inside a valid text",
    ),
    _of(
        "rejects valid JSON",
        ForbidsOneMore,
        "test_valid_json_passes_in_every_tokenization",
        SCHEMAS[0],
        says="is forbidden inside a valid text",
    ),
    _of(
        "does not enforce tags",
        AllowsEverything,
        "test_tags_in_free_text_are_enforced",
        TAGS[0],
        says="passes and is invalid",
    ),
    _of(
        "allows an end inside a value",
        EndsAnywhere,
        "test_invalid_json_is_stopped",
        SCHEMAS[0],
        says="passes and is invalid",
    ),
    _of(
        "allows a token after which no valid JSON is possible",
        AllowsOneMore,
        "test_every_allowed_token_leads_to_valid_json",
        SCHEMAS[1],
    ),
    _of(
        "accepts anything",
        AcceptsAnything,
        "test_accept_agrees_with_the_mask",
        REGULAR[0],
        says="forbidden and accepted",
    ),
    _of("rolls back one token too few", RollsBackOneLess, "test_rollback_is_replay", REGULAR[0]),
    _of("does not terminate at the end", NeverEnds, "test_the_end", FINITE[0]),
    _of("accepts an early end", AcceptsAnything, "test_the_end_is_refused_before_it", REGULAR[0]),
    _of(
        "shares the state of all requests", SharesOneMatcher, "test_matchers_of_one_grammar_are_independent", REGULAR[0]
    ),
    _of(
        "returns text that is not forced",
        JumpsTooFar,
        "test_jump_forward_returns_the_forced_text",
        FINITE[0],
        says="is not forced",
    ),
    _of("is not safe in threads", CompilesTheLatest, "test_compiles_in_many_threads"),
    _of("reads another grammar than was written", ReadsAnother, "test_a_grammar_crosses_processes_as_bytes", FINITE[0]),
    _of("refuses nothing", RefusesNothing, "test_refuses_invalid_constraints", INVALID[0], says="DID NOT RAISE"),
    _of(
        "refuses without a keyword",
        RefusesWithoutKeyword,
        "test_is_enforced_or_refused_by_keyword",
        HARD[0],
        says="no keyword",
    ),
    _of("refuses in check what compile accepts", ChecksTooMuch, "test_check_refuses_nothing_that_compiles"),
    _of(
        "accepts kinds that it does not declare",
        RefusesNothing,
        "test_refuses_kinds_that_are_not_declared",
        says="DID NOT RAISE",
    ),
]
