"""Test the rules of ``select`` against their definitions. Run: python -m pytest tests/core/test_lang_choices.py"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dovetail.lang import greedy_token_selection, token_length_normalized, unconditional_likelihood_normalized
from dovetail.lang.backends.base import joined_scores
from dovetail.lang.choices import Scored

logprob = st.floats(-20, 0)
options = st.lists(
    st.lists(st.tuples(st.integers(0, 5), logprob, logprob), min_size=1, max_size=5), min_size=1, max_size=6
)


def scored(rows) -> list[Scored]:
    return [Scored(*map(tuple, zip(*row, strict=True))) for row in rows]


@given(options)
def test_by_the_mean(rows):
    means = [np.mean([p for _, p, _ in row]) for row in rows]
    decision = token_length_normalized(scored(rows))
    assert np.isclose(means[decision.index], max(means))
    assert np.allclose(decision.scores, means)


@given(options)
def test_by_what_the_prompt_adds(rows):
    gains = [np.mean([p - q for _, p, q in row]) for row in rows]
    decision = unconditional_likelihood_normalized(scored(rows))
    assert np.isclose(gains[decision.index], max(gains), atol=1e-9)


def test_a_first_token_that_nothing_is_known_of_counts_as_sure():
    found = unconditional_likelihood_normalized(
        [Scored((1, 2), (-1.0, -1.0), (None, -4.0)), Scored((3,), (-0.5,), (None,))]
    )
    assert found.scores == (1.0, -0.5)
    assert found.details["normalized_unconditional_prompt_logprobs"] == [-2.0, 0.0]


def walk(rows) -> int:
    """Decode greedily among the choices: at each position, the most likely of the remaining choices."""
    texts = [tuple(t for t, _, _ in row) for row in rows]
    left = list(range(len(rows)))
    for at in range(max(map(len, texts))):
        worth = [rows[i][at][1] if at < len(rows[i]) else np.mean([p for _, p, _ in rows[i]]) for i in range(len(rows))]
        best = max(worth[i] for i in left)
        left = [i for i in left if worth[i] == best]
    return left[0]


@given(options)
def test_token_by_token(rows):
    rows = [[(10 * i + at, *token[1:]) for at, token in enumerate(row)] for i, row in enumerate(rows)]
    assert greedy_token_selection(scored(rows)).index == walk(rows)


def test_greedy_prefers_a_likely_beginning():
    surely, on_average = Scored((1, 2), (-0.1, -9.0)), Scored((3, 4), (-1.0, -1.0))
    assert greedy_token_selection([on_average, surely]).index == 1
    assert token_length_normalized([on_average, surely]).index == 0


def test_of_equals_the_first():
    same = [Scored((i,), (-1.0,)) for i in range(3)]
    for method in (token_length_normalized, greedy_token_selection):
        assert method(same).index == 0


def test_scores_begin_where_choices_differ_from_the_prompt():
    """Two tokens before the choice were requested; the second of them differs when it is tokenized with a choice."""
    kept = [[(7, -5.0), (8, -5.0), (1, -1.0)], [(7, -5.0), (8, -5.0), (2, -2.0), (3, -3.0)]]
    assert [each.logprobs for each in joined_scores([7, 8], kept)] == [(-1.0,), (-2.0, -3.0)]
    merged = [[(7, -5.0), (8, -5.0), (1, -1.0)], [(7, -5.0), (9, -2.0)]]
    assert [each.tokens for each in joined_scores([7, 8], merged)] == [(8, 1), (9,)]
    assert [each.tokens for each in joined_scores([7, 8], merged[1:] * 2)] == [(9,), (9,)]


def test_a_choice_without_log_probabilities_comes_last():
    for method in (token_length_normalized, greedy_token_selection):
        assert method([Scored((), ()), Scored((1,), (-9.0,))]).index == 1


def test_greedy_takes_one_token_for_one_token():
    """The rounding of the same token's log-probability in the row of each choice does not matter."""
    short, long = Scored((5,), (-7.1,)), Scored((5, 6), (-7.1 + 1e-6, -10.0))
    for first, second, index in ((short, long, 0), (long, short, 1)):
        assert greedy_token_selection([first, second]).index == index
    unknown = [Scored((-1,), (-7.1,)), Scored((-1, -1), (-7.0, -10.0))]
    assert greedy_token_selection(unknown).index == 1
