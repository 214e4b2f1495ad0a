"""Test constraints that begin later in the output.

Run: python -m pytest -q tests/core/test_gated_matcher.py
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.constraints.gated import FreeTokens, gated
from dovetail.interfaces.grammar import Matcher
from dovetail.sampling_params import GrammarGate
from dovetail.types import IntArray

V, EOS = 40, 39
WORD = (5, 6, 7)
"""The grammar of the inner matcher: these tokens, then the end."""


class Word(Matcher):
    def __init__(self) -> None:
        self.at = 0

    def _wanted(self) -> int:
        return (*WORD, EOS, EOS)[min(self.at, len(WORD) + 1)]

    def fill_bitmask(self, bitmask: IntArray, row: int) -> None:
        bitmask[row] = 0
        bitmask.view(np.uint32)[row, self._wanted() // 32] = 1 << (self._wanted() % 32)

    def accept(self, token_id: int) -> bool:
        if token_id != self._wanted():
            return False
        self.at += 1
        return True

    def rollback(self, num_tokens: int) -> None:
        self.at -= num_tokens

    @property
    def is_terminated(self) -> bool:
        return self.at > len(WORD)


def matcher(gate: GrammarGate) -> Matcher:
    return gated(Word(), gate, FreeTokens(V, [EOS]))


def allowed(made: Matcher) -> set[int]:
    bitmask = np.full((3, 2), 12345, np.int32)
    made.fill_bitmask(bitmask, 1)
    assert (bitmask[[0, 2]] == 12345).all()
    bits = np.unpackbits(bitmask[1].view(np.uint8), bitorder="little")
    assert not bits[V:].any()
    return set(np.flatnonzero(bits).tolist())


def walk(made: Matcher, *tokens: int) -> Matcher:
    for token in tokens:
        assert token in allowed(made)
        assert made.accept(token)
    return made


EVERY = set(range(V))
GATES = {
    "inside": GrammarGate(until=9),
    "optional": GrammarGate(lead=(8,), optional=True, until=9),
    "harmony": GrammarGate(lead=(1, 2, 3), until=9, prefix=(1, 4)),
    "prefix": GrammarGate(prefix=(10, 11)),
    "ends": GrammarGate(until=9, may_end=True),
    "fed": GrammarGate(prefix=(5,), prefix_in_grammar=True),
}


def test_no_gate_no_wrapper():
    inner = Word()
    assert gated(inner, None, FreeTokens(V, [EOS])) is inner


def test_a_free_part_ends_with_its_mark_and_not_before():
    made = matcher(GATES["inside"])
    assert allowed(made) == EVERY - {EOS}
    assert not made.accept(EOS)
    walk(made, 5, 17, 9)
    assert allowed(made) == {5}
    assert walk(made, *WORD, EOS).is_terminated


def test_an_output_may_end_in_a_free_part_that_allows_it():
    made = matcher(GATES["ends"])
    assert allowed(made) == EVERY
    assert walk(made, 3, EOS).is_terminated
    assert allowed(made) == {EOS}


def test_an_optional_lead():
    assert allowed(matcher(GATES["optional"])) == {8, 5}
    assert walk(matcher(GATES["optional"]), *WORD, EOS).is_terminated
    made = walk(matcher(GATES["optional"]), 8)
    assert allowed(made) == EVERY - {EOS}
    assert allowed(walk(made, 30, 9)) == {5}


def test_lead_and_prefix_are_forced():
    made = walk(matcher(GATES["harmony"]), 1, 2)
    assert allowed(made) == {3}
    assert not made.accept(4)
    made = walk(made, 3, 20, 21, 9)
    assert allowed(made) == {1}
    assert walk(made, 1, 4, *WORD, EOS).is_terminated


def test_a_prefix_may_be_the_grammar_s_own():
    made = matcher(GATES["fed"])
    assert allowed(made) == {5}
    assert walk(made, *WORD, EOS).is_terminated


@pytest.mark.parametrize("name", GATES)
@given(seed=st.integers(0, 2**32), back=st.lists(st.integers(0, 5), max_size=8))
@settings(max_examples=60)
def test_rollback_restores_every_place(name: str, seed: int, back: list[int]):
    """Along random walks with rollbacks, the mask depends only on the tokens that are left."""
    rng = np.random.default_rng(seed)
    made, path = matcher(GATES[name]), []
    for step in range(16):
        assert allowed(made) == allowed(walk(matcher(GATES[name]), *path))
        for token in range(V):
            if token not in allowed(made):
                assert not made.accept(token), "what the mask forbids is not accepted"
        if step < len(back):
            count = min(back[step], len(path))
            made.rollback(count)
            del path[len(path) - count :]
        if not made.is_terminated:
            usual = sorted(allowed(made) - ({EOS} if len(allowed(made)) > 1 else set()))
            path.append(9 if 9 in usual and rng.random() < 0.3 else int(rng.choice(usual)))
            assert made.accept(path[-1])


def test_a_mark_is_written_where_its_stand_in_may_be():
    """Token 6 of the inner grammar stands for 20: the output has 20 in its place, and 6 nowhere."""
    made = matcher(GrammarGate(marks=((20, 6), (21, 12))))
    assert gated_inner(made) is None
    walk(made, 5)
    assert allowed(made) == {20}
    assert not made.accept(6)
    assert made.accept(20)
    assert allowed(made) == {7}
    made.rollback(1)
    assert allowed(made) == {20}
    assert walk(made, 20, 7, EOS).is_terminated


def test_a_prefix_that_the_grammar_holds_may_have_marks():
    made = matcher(GrammarGate(prefix=(5, 20), prefix_in_grammar=True, marks=((20, 6),)))
    assert walk(made, 5, 20, 7, EOS).is_terminated
    made.rollback(3)
    assert allowed(made) == {20}


def gated_inner(made: Matcher) -> Matcher | None:
    """Return the matcher that fills masks for many rows in one call, where it alone decides."""
    return made.inner
