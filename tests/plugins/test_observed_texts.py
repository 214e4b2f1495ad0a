"""Test which rows of a step drafters with hidden states of the target read, and which get drafts.

Run: python -m pytest -q tests/plugins/test_observed_texts.py
"""

from __future__ import annotations

import pytest
import torch

from dovetail.testing.drafter import RunningRequest, make_committed, make_decode_batch, make_running
from dovetail.types import ForwardOutput
from dovetail_speculative.observed import ObservedTexts

OUTPUT = ForwardOutput(torch.zeros(0, 1, dtype=torch.int64))


@pytest.fixture
def reqs() -> list[RunningRequest]:
    return [make_running(uid, [5, 6, 7]) for uid in range(3)]


def commit(
    texts: ObservedTexts, reqs: list[RunningRequest], num_extend: int = 0, *, succeeds: bool = True
) -> list[int]:
    """Commit a step in which each request gets a token. Return the uids of the rows that the drafter reads."""
    batch = make_decode_batch(reqs, [9] * len(reqs), num_extend)
    for req in reqs:
        req.append([8])
    new = texts.take(batch, OUTPUT, make_committed(reqs))
    if new is None:
        return []
    if succeeds:
        texts.finish(batch, new)
    return [reqs[row].admitted.uid for row in new.rows.tolist()]


def drafted(texts: ObservedTexts, reqs: list[RunningRequest], num_extend: int = 0) -> list[int]:
    """Return the uids of the rows that get drafts, without the first request, for which there are no pages."""
    limits = [0, 9, 9]
    return [reqs[row].admitted.uid for row in texts.draft_rows(make_decode_batch(reqs, limits, num_extend), limits)]


def test_texts_are_read_from_their_beginning(reqs: list[RunningRequest]) -> None:
    texts = ObservedTexts()
    assert commit(texts, reqs) == drafted(texts, reqs) == []
    assert len(texts) == 3
    texts = ObservedTexts()
    assert commit(texts, reqs, num_extend=3) == [0, 1, 2]
    assert commit(texts, reqs) == [0, 1, 2]
    assert drafted(texts, reqs) == [1, 2]
    assert drafted(texts, reqs, num_extend=2) == [2]


def test_a_request_of_which_a_token_was_missed_starts_again(reqs: list[RunningRequest]) -> None:
    texts = ObservedTexts()
    commit(texts, reqs, num_extend=3)
    commit(ObservedTexts(), reqs[2:])  # a step that is not observed
    assert drafted(texts, reqs) == [1]
    for _ in range(2):
        assert commit(texts, reqs) == [0, 1]
        assert drafted(texts, reqs) == [1]
    texts.forget(2)
    assert 2 not in texts
    assert commit(texts, [reqs[2], *reqs[:2]], num_extend=1) == [2, 0, 1]
    assert drafted(texts, reqs) == [1, 2]


def test_a_text_whose_tokens_could_not_be_read_gets_no_drafts(reqs: list[RunningRequest]) -> None:
    texts = ObservedTexts()
    commit(texts, reqs, num_extend=3)
    commit(texts, reqs[:2], succeeds=False)
    assert drafted(texts, reqs) == [2]
    assert commit(texts, reqs) == [2]


def test_nothing_is_kept_of_requests_that_ended_before_the_step_was_committed(reqs: list[RunningRequest]) -> None:
    texts = ObservedTexts()
    commit(texts, reqs, num_extend=3)
    texts.forget(1)
    reqs[1].ended = True
    commit(texts, reqs, num_extend=3)
    assert 1 not in texts
    assert len(texts) == 2
