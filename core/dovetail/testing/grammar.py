"""Provide the conformance suite of grammar backends."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import pytest

from dovetail.errors import GrammarError
from dovetail.interfaces.features import Feature
from dovetail.interfaces.grammar import CompiledGrammar, GrammarBackend, Matcher
from dovetail.registry.specs import ComponentKind
from dovetail.sampling_params import GrammarSpec
from dovetail.testing.component import ComponentSuite
from dovetail.testing.grammar_cases import (
    EOS,
    EXACT,
    FEATURES,
    HARD,
    INVALID,
    JSON_OBJECT,
    REGULAR,
    SCHEMAS,
    TAGS,
    TOKEN_BYTES,
    TREE,
    VOCAB_SIZE,
    ExactCase,
    JsonCase,
    TextCase,
    context,
)
from dovetail.testing.grammar_languages import Language, follow
from dovetail.types import IntArray

WIDTH = -(-VOCAB_SIZE // 32)
STEPS = 24
_REGULAR = frozenset(case.spec for case in REGULAR)
GARBAGE = -0x5A5A5A5B

each_exact = pytest.mark.parametrize("case", EXACT, ids=lambda case: case.spec.text[:24])
each_json = pytest.mark.parametrize("case", [*SCHEMAS, JSON_OBJECT], ids=lambda case: case.spec.text[:24] or "object")
each_hard = pytest.mark.parametrize("case", HARD, ids=lambda case: case.spec.text[:60])
each_tag = pytest.mark.parametrize("case", TAGS, ids=lambda case: case.spec.text[:48])
each_invalid = pytest.mark.parametrize("spec", INVALID, ids=lambda spec: f"{spec.kind}-{spec.text[:24]}")


def allowed_tokens(matcher: Matcher) -> frozenset[int]:
    """Return the tokens of the matcher's bitmask row. The row is written over garbage, between two rows that must not
    change."""
    bitmask = np.full((3, WIDTH), GARBAGE, np.int32)
    matcher.fill_bitmask(bitmask, 1)
    assert (bitmask[[0, 2]] == GARBAGE).all(), "fill_bitmask wrote into another row"
    bits = np.unpackbits(bitmask[1].view(np.uint8), bitorder="little")
    return frozenset(map(int, np.flatnonzero(bits)))


def tokenizations(data: bytes, rng: random.Random, count: int = 4) -> list[list[int]]:
    """Return tokenizations of ``data``: byte by byte, longest token first, and ``count`` random ones."""
    return [_spell(data, lambda ids: ids[0]), _spell(data, lambda ids: ids[-1])] + [
        _spell(data, rng.choice) for _ in range(count)
    ]


def _spell(data: bytes, choose: Callable[[Sequence[int]], int]) -> list[int]:
    ids: list[int] = []
    while data:
        fitting = [i for i, piece in enumerate(TOKEN_BYTES) if piece and data.startswith(piece)]
        ids.append(choose(sorted(fitting, key=lambda i: len(TOKEN_BYTES[i] or b""))))
        data = data[len(TOKEN_BYTES[ids[-1]] or b"") :]
    return ids


def advance(matcher: Matcher, tokens: Iterable[int]) -> None:
    """Make the matcher accept ``tokens``, each of which the mask must allow."""
    for token in tokens:
        assert token in allowed_tokens(matcher), f"{TOKEN_BYTES[token]!r} is forbidden inside a valid text"
        assert matcher.accept(token), f"{TOKEN_BYTES[token]!r} is allowed by the mask and refused by accept"


def expected_tokens(state: Language) -> frozenset[int]:
    """Return the tokens that the mask must allow: every token that continues some valid text, and the end tokens if the
    text may end."""
    inside = (i for i, piece in enumerate(TOKEN_BYTES) if piece and follow(state, piece) is not None)
    return frozenset([*inside, *(EOS if state.ends else ())])


class GrammarSuite(ComponentSuite):
    """Test that a grammar backend conforms to its interface. ``class TestMine(GrammarSuite): name = "mine"`` is a whole
    test file."""

    kind: ClassVar[ComponentKind] = ComponentKind.GRAMMAR
    partial: ClassVar[bool] = False
    """True if the backend need not support all regexes: it must support alternations of plain texts, and may refuse
    others."""
    recursive: ClassVar[bool] = True
    """False if the backend refuses schemas that refer to themselves."""

    def make(self) -> GrammarBackend:
        """Return a new backend for the suite's vocabulary. Override it to test a class that no plugin registers."""
        return self.build(context())

    def compiled(self, spec: GrammarSpec) -> CompiledGrammar:
        """Return the compiled constraint. Skip the test if the backend does not declare this kind of constraint."""
        self.require(FEATURES[spec.kind])
        backend = self.make()
        try:
            return backend.compile(spec)
        except GrammarError as error:
            if not self.may_refuse(spec):
                raise
            pytest.skip(f"{self.name} refuses it: {error}")

    def may_refuse(self, spec: GrammarSpec) -> bool:
        """Return true for a valid constraint of a declared kind that the backend is known to refuse."""
        return (self.partial and spec in _REGULAR) or (not self.recursive and spec == TREE.spec)

    def matcher(self, spec: GrammarSpec) -> Matcher:
        """Return a new matcher of the constraint."""
        return self.compiled(spec).matcher()

    # -- soundness and completeness ----------------------------------------------------------------------------------

    @each_exact
    def test_masks_are_exact_along_random_texts(self, case: ExactCase) -> None:
        """Check that a token is allowed exactly if it continues some valid text."""
        rng = random.Random(case.spec.text)
        for _ in range(6):
            matcher, state = self.matcher(case.spec), case.language
            for _ in range(STEPS):
                allowed = allowed_tokens(matcher)
                self._compare(allowed, expected_tokens(state), case)
                inside = sorted(allowed - set(EOS))
                if not inside:
                    break
                token = rng.choice(inside)
                assert matcher.accept(token)
                state = follow(state, TOKEN_BYTES[token] or b"")
                assert state is not None

    def _compare(self, allowed: frozenset[int], expected: frozenset[int], case: ExactCase) -> None:
        def show(ids: frozenset[int]) -> Sequence[object]:
            return [(i, TOKEN_BYTES[i] if i < len(TOKEN_BYTES) else "beyond the vocabulary") for i in sorted(ids)][:5]

        assert not allowed - expected, f"{case.spec.text}: allowed, but leads nowhere: {show(allowed - expected)}"
        assert not expected - allowed, f"{case.spec.text}: forbidden, but valid: {show(expected - allowed)}"

    @each_exact
    def test_valid_texts_pass_in_every_tokenization(self, case: ExactCase) -> None:
        """Check that a valid text is accepted to its end in every tokenization."""
        self._pass_all(case.spec, case.texts)

    @each_json
    def test_valid_json_passes_in_every_tokenization(self, case: JsonCase) -> None:
        """Check that a valid instance is accepted to its end, compact or with spaces."""
        assert all(case.valid(json.loads(text)) for text in case.texts)
        self._pass_all(case.spec, case.texts)

    def _pass_all(self, spec: GrammarSpec, texts: Sequence[str]) -> None:
        rng = random.Random(spec.text)
        for text in texts:
            for tokens in tokenizations(text.encode(), rng):
                matcher = self.matcher(spec)
                advance(matcher, tokens)
                assert set(EOS) <= allowed_tokens(matcher), f"{text!r} is complete, but cannot end"
                assert matcher.accept(EOS[0])
                assert matcher.is_terminated

    @each_tag
    def test_tags_in_free_text_are_enforced(self, case: TextCase) -> None:
        """Check that text without a trigger is free, and that text after a trigger must be a complete and valid
        structure."""
        self._pass_all(case.spec, case.texts)
        rng = random.Random(case.spec.text)
        for text in case.wrong:
            for tokens in tokenizations(text.encode(), rng):
                assert not self._ends(case.spec, tokens), f"{text!r} passes and is invalid"

    def _ends(self, spec: GrammarSpec, tokens: Sequence[int]) -> bool:
        """Return true if the tokens are accepted and the text may end after them."""
        matcher = self.matcher(spec)
        return all(matcher.accept(token) for token in tokens) and bool(set(EOS) & allowed_tokens(matcher))

    @each_json
    def test_invalid_json_is_stopped(self, case: JsonCase) -> None:
        """Check that an invalid instance is never accepted to its end."""
        rng = random.Random(case.spec.text)
        for text in case.wrong:
            for tokens in tokenizations(text.encode(), rng):
                assert not self._ends(case.spec, tokens), f"{text!r} passes and is invalid"

    @each_json
    def test_every_allowed_token_leads_to_valid_json(self, case: JsonCase) -> None:
        """Check that after every token that is allowed along random texts, the text can be completed and is then valid."""
        rng = random.Random(case.spec.text)
        for _ in range(4):
            path: list[int] = []
            for _ in range(8):
                allowed = sorted(allowed_tokens(self.replayed(case.spec, path)))
                assert allowed, f"nothing may follow {spelled(path)!r}"
                for token in rng.sample(allowed, min(6, len(allowed))):
                    self._finish(case, [*path, token])
                inside = [token for token in allowed if token not in EOS]
                if not inside:
                    break
                path.append(rng.choice(inside))

    def _finish(self, case: JsonCase, path: list[int]) -> None:
        matcher = self.replayed(case.spec, path)
        path = list(path)
        for _ in range(200):
            allowed = allowed_tokens(matcher)
            if path[-1] in EOS or allowed & set(EOS):
                break
            assert allowed, f"nothing may follow {spelled(path)!r}"
            path.append(min(allowed, key=_closing_first))
            assert matcher.accept(path[-1])
        text = spelled(path)
        assert case.valid(json.loads(text)), f"{text!r} was accepted and is invalid"

    def replayed(self, spec: GrammarSpec, path: Iterable[int]) -> Matcher:
        """Return a new matcher that has accepted the tokens of ``path``."""
        matcher = self.matcher(spec)
        for token in path:
            assert matcher.accept(token)
        return matcher

    # -- the state ---------------------------------------------------------------------------------------------------

    @each_exact
    def test_accept_agrees_with_the_mask(self, case: ExactCase) -> None:
        """Check that tokens that the mask forbids, and ids that do not exist, are refused without a change of the
        state."""
        rng = random.Random(case.spec.text)
        matcher = self.matcher(case.spec)
        for token in tokenizations(case.texts[-1].encode(), rng)[-1]:
            allowed = allowed_tokens(matcher)
            for other in [*rng.sample(range(len(TOKEN_BYTES)), 40), 1, VOCAB_SIZE - 1, VOCAB_SIZE, 10**6, -1]:
                assert other in allowed or not matcher.accept(other), f"token {other} is forbidden and accepted"
            assert allowed_tokens(matcher) == allowed, "a refused token changed the state"
            assert matcher.accept(token)

    @each_exact
    def test_rollback_is_replay(self, case: ExactCase) -> None:
        """Check that after a rollback the matcher is in the state of the shorter text, and continues in the same way."""
        self.require(Feature.GRAMMAR_ROLLBACK)
        rng = random.Random(case.spec.text)
        for text in case.texts:
            tokens = [*tokenizations(text.encode(), rng)[0], EOS[1]]
            for back in range(len(tokens) + 1):
                matcher = self.replayed(case.spec, tokens)
                matcher.rollback(back)
                left = tokens[: len(tokens) - back]
                fresh = self.replayed(case.spec, left)
                assert matcher.is_terminated == fresh.is_terminated
                if EOS[1] not in left:
                    assert allowed_tokens(matcher) == allowed_tokens(fresh), (
                        f"after a rollback of {back} of {len(tokens)} tokens"
                    )
                    advance(matcher, tokens[len(left) :])

    @each_exact
    def test_the_end(self, case: ExactCase) -> None:
        """Check that a matcher terminates once it has accepted an end token or only end tokens may follow, and not
        before."""
        for text in case.texts:
            for end in EOS:
                matcher, state = self.matcher(case.spec), case.language
                for byte in text.encode():
                    assert not matcher.is_terminated
                    advance(matcher, [TOKEN_BYTES.index(bytes([byte]))])
                    state = follow(state, bytes([byte]))
                assert state is not None
                assert matcher.is_terminated == (expected_tokens(state) == frozenset(EOS))
                assert matcher.accept(end)
                assert matcher.is_terminated
                assert not matcher.accept(TOKEN_BYTES.index(b"a")), "something was accepted after the end"

    @each_exact
    def test_the_end_is_refused_before_it(self, case: ExactCase) -> None:
        """Check that an end token is refused where the text may not end."""
        matcher = self.matcher(case.spec)
        if not case.language.ends:
            assert not any(matcher.accept(end) for end in EOS)
        advance(matcher, tokenizations(case.texts[0].encode(), random.Random(0))[0])

    @each_exact
    def test_matchers_of_one_grammar_are_independent(self, case: ExactCase) -> None:
        """Check that interleaved matchers are independent, and that rows filled together equal rows filled one at a
        time."""
        backend, compiled = self.make(), self.compiled(case.spec)
        assert compiled.num_bytes >= 0
        texts = [_spell(text.encode(), lambda ids: ids[0]) for text in case.texts]
        matchers = [compiled.matcher() for _ in texts]
        for step in range(max(map(len, texts))):
            for matcher, tokens in zip(matchers, texts, strict=True):
                if step < len(tokens):
                    advance(matcher, [tokens[step]])
        bitmask = np.full((len(matchers) + 2, WIDTH), GARBAGE, np.int32)
        rows = [len(matchers) - i for i in range(len(matchers))]
        backend.fill_bitmasks(matchers, bitmask, rows)
        for matcher, row, tokens in zip(matchers, rows, texts, strict=True):
            alone = self._row(self.replayed(case.spec, tokens))
            assert (bitmask[row] == alone).all()
            assert (self._row(matcher) == alone).all()
        assert (bitmask[[0, -1]] == GARBAGE).all()

    @staticmethod
    def _row(matcher: Matcher) -> IntArray:
        bitmask = np.full((1, WIDTH), GARBAGE, np.int32)
        matcher.fill_bitmask(bitmask, 0)
        return bitmask[0]

    @each_exact
    def test_jump_forward_returns_the_forced_text(self, case: ExactCase) -> None:
        """Check that the forced text is a prefix of every valid continuation."""
        self.require(Feature.GRAMMAR_JUMP_FORWARD)
        for text in case.texts:
            data = text.encode()
            for start in range(len(data)):
                prefix = [TOKEN_BYTES.index(bytes([byte])) for byte in data[:start]]
                forced = self.replayed(case.spec, prefix).jump_forward().encode()
                assert data[start:].startswith(forced), f"{forced!r} is not forced after {data[:start]!r}"

    # -- compiling ---------------------------------------------------------------------------------------------------

    def test_compiles_in_many_threads(self) -> None:
        """Check that ``compile`` returns the same grammars when several threads call it at once."""
        specs = [case.spec for case in [*EXACT, *SCHEMAS, *TAGS] if self.offers(FEATURES[case.spec.kind])]
        specs = [spec for spec in specs if not self.may_refuse(spec)]
        backend = self.make()
        alone = [allowed_tokens(self.make().compile(spec).matcher()) for spec in specs]
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(backend.compile, specs * 4))
        assert [allowed_tokens(compiled.matcher()) for compiled in together] == alone * 4

    @each_exact
    def test_a_grammar_crosses_processes_as_bytes(self, case: ExactCase) -> None:
        """Check that a backend loads what another instance with the same settings has dumped, with the same masks along
        a text."""
        self.require(Feature.GRAMMAR_PORTABLE)
        self.compiled(case.spec)
        writer = self.make()
        written = writer.compile(case.spec)
        read = self.make().load(writer.dump(written))
        ours, theirs = written.matcher(), read.matcher()
        for token in [*_spell(case.texts[-1].encode(), lambda ids: ids[-1]), EOS[0]]:
            assert allowed_tokens(theirs) == allowed_tokens(ours)
            assert ours.accept(token)
            assert theirs.accept(token)

    @each_invalid
    def test_refuses_invalid_constraints(self, spec: GrammarSpec) -> None:
        """Check that an invalid constraint raises a ``GrammarError`` with a message, and no other exception."""
        self.require(FEATURES[spec.kind])
        with pytest.raises(GrammarError) as caught:
            self.make().compile(spec)
        assert len(str(caught.value)) > 10

    @each_hard
    def test_is_enforced_or_refused_by_keyword(self, case: JsonCase) -> None:
        """Check that a constraint is enforced, or refused with the keyword at fault, so that ``auto`` can try another
        backend."""
        self.require(FEATURES[case.spec.kind])
        refused = _refusal(self.make().compile, case.spec)
        if refused is None:
            self.test_invalid_json_is_stopped(case)
        else:
            assert refused.keyword, f"{refused}: no keyword"

    def test_check_refuses_nothing_that_compiles(self) -> None:
        """Check that ``check`` refuses nothing that ``compile`` accepts, and raises only ``GrammarError``."""
        backend = self.make()
        for spec in [*(case.spec for case in [*EXACT, *SCHEMAS, *HARD, *TAGS, JSON_OBJECT]), *INVALID]:
            if self.offers(FEATURES[spec.kind]):
                refused, caught = _refusal(backend.check, spec), _refusal(backend.compile, spec)
                assert refused is None or (caught is not None and caught.keyword == refused.keyword), spec

    def test_refuses_kinds_that_are_not_declared(self) -> None:
        """Check that a kind of constraint that the backend does not declare is refused with a ``GrammarError``."""
        for case in [*EXACT, SCHEMAS[0], JSON_OBJECT, TAGS[0]]:
            if not self.offers(FEATURES[case.spec.kind]):
                with pytest.raises(GrammarError):
                    self.make().compile(case.spec)


def _refusal(action: Callable[[GrammarSpec], object], spec: GrammarSpec) -> GrammarError | None:
    try:
        action(spec)
    except GrammarError as error:
        return error
    return None


def spelled(path: Iterable[int]) -> str:
    """Return the text of tokens."""
    return b"".join(TOKEN_BYTES[token] or b"" for token in path).decode("utf-8", "backslashreplace")


_CLOSING = b'"}]:,0123456789' + bytes(range(97, 123)) + b"{[" + bytes(range(0x80, 0xC0))


def _closing_first(token: int) -> tuple[int, int]:
    """Return a sort key that puts tokens first that end a JSON text soon."""
    data = TOKEN_BYTES[token] or b""
    rank = _CLOSING.find(data) if len(data) == 1 else -1
    return (rank if rank >= 0 else len(_CLOSING)), token
