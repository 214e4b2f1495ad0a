"""Test the matcher that restricts tokens against definitions by brute force, with random words, budgets and rollbacks.

Run: python -m pytest -q tests/core/test_restricted_matcher.py
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.constraints.restricted import RestrictedMatcher, restrictions_of
from dovetail.errors import RequestError
from dovetail.interfaces.grammar import Matcher
from dovetail.sampling_params import SamplingParams, ThinkingSpan

VOCAB = 40
LEAD, UNTIL = (7, 8), 9
WORDS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=4)


class Letters:
    """Encode a text of digits as their values; a space before a digit is part of its token (value + 20)."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        spaced = text.startswith(" ")
        ids = [int(char) for char in text.strip()]
        return [ids[0] + 20 * spaced, *ids[1:]]


class Even(Matcher):
    """Allow even tokens and the token that ends reasoning."""

    def __init__(self) -> None:
        self.count = 0

    def fill_bitmask(self, bitmask, row: int) -> None:
        bitmask[row] = packed(lambda token: self.allows(token))

    def allows(self, token: int) -> bool:
        return token % 2 == 0 or token in (7, UNTIL)

    def accept(self, token_id: int) -> bool:
        self.count += self.allows(token_id)
        return self.allows(token_id)

    def rollback(self, num_tokens: int) -> None:
        self.count -= num_tokens

    @property
    def is_terminated(self) -> bool:
        return False


def packed(allows) -> np.ndarray:
    flags = np.zeros(64, np.uint8)
    flags[:VOCAB] = [allows(token) for token in range(VOCAB)]
    return np.packbits(flags, bitorder="little").view(np.int32)


def expected(params: SamplingParams, words: list[list[int]], inner: bool, tokens: list[int]) -> set[int]:
    """Return the tokens that may follow ``tokens``, by definition."""
    found = set(range(VOCAB)) if params.allowed_token_ids is None else set(params.allowed_token_ids)
    for word in words:
        for ids in (word, [word[0] + 20, *word[1:]]):
            if tokens[len(tokens) - len(ids) + 1 :] == ids[:-1] and len(tokens) >= len(ids) - 1:
                found.discard(ids[-1])
    if inner:
        found = {token for token in found if Even().allows(token)}
    span, budget = params.thinking_span, params.thinking_budget
    if span is not None and budget is not None:
        inside, ended, used = span.begun, False, 0
        for i, token in enumerate(tokens):
            used += inside
            if inside and token == UNTIL:
                inside, ended = False, True
            elif not inside:
                inside = bool(span.lead) and tuple(tokens[: i + 1][-len(span.lead) :]) == span.lead
        if inside and used >= budget:
            found &= {UNTIL}
        elif ended and used >= budget and len(span.lead) == 1:
            found -= {*span.lead}
    return found


@settings(max_examples=300, deadline=None)
@given(words=WORDS, allowed=st.none() | st.sets(st.integers(0, VOCAB - 1), min_size=4), inner=st.booleans(),
       budget=st.none() | st.integers(0, 4), lead=st.sampled_from([(), LEAD[:1], LEAD]), begun=st.booleans(),
       data=st.data())  # fmt: skip
def test_it_allows_what_the_definitions_allow(words, allowed, inner: bool, budget, lead, begun: bool, data):
    span = None if budget is None else ThinkingSpan(lead, UNTIL, begun or not lead)
    ids = None if allowed is None else tuple(sorted(allowed))
    params = SamplingParams(bad_words=tuple("".join(map(str, word)) for word in words), allowed_token_ids=ids,
                            thinking_budget=budget, thinking_span=span)  # fmt: skip
    try:
        restrictions = restrictions_of(params, VOCAB, Letters())
    except RequestError:  # the words leave no token
        assert not expected(params, [word for word in words if len(word) == 1], False, [])
        return
    if restrictions is None:
        assert (words, allowed, budget) == ([], None, None)
        return
    even = Even()
    matcher, tokens = RestrictedMatcher(restrictions, even if inner else None), list[int]()
    for _ in range(12):
        may = expected(params, words, inner, tokens)
        bitmask = np.full((2, 2), -1, np.int32)
        if not may:
            with pytest.raises(RequestError, match="leave no token"):
                matcher.fill_bitmask(bitmask, 1)
            return
        matcher.fill_bitmask(bitmask, 1)
        assert bitmask[1].tolist() == packed(may.__contains__).tolist()
        assert (bitmask[0] == -1).all()
        forbidden = sorted(set(range(VOCAB)) - may)
        if forbidden:
            assert not matcher.accept(data.draw(st.sampled_from(forbidden)))
        token = data.draw(st.sampled_from([t for t in (*LEAD, UNTIL, 1, 2, 3) if t in may] or sorted(may)))
        assert matcher.accept(token)
        tokens.append(token)
        if data.draw(st.integers(0, 3)) == 0:
            back = data.draw(st.integers(0, len(tokens)))
            matcher.rollback(back)
            del tokens[len(tokens) - back :]
    assert even.count == (len(tokens) if inner else 0)
