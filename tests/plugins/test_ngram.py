"""Test the n-gram drafter: the suite, and each draft against a plain search of the text.

Run: python -m pytest -q tests/plugins/test_ngram.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from dovetail.interfaces.speculative import DrafterContext
from dovetail.testing.drafter import DrafterSuite, draft_of, make_decode_batch, make_running
from dovetail_speculative.config import NgramConfig
from dovetail_speculative.ngram import NgramDrafter
from dovetail_speculative.ngram_index import NgramIndex

CONTEXT = DrafterContext(torch.device("cpu"), vocab_size=64, max_rows=16, max_context=256)


class TestNgram(DrafterSuite):
    name = "ngram"
    learns = True


class TestNgramByItself(DrafterSuite):
    name = "ngram"
    settings = {"num_draft_tokens": 16, "min_ngram": 1, "memory": 8, "shared": 0}  # noqa: RUF012


def _search(text: list[int], min_ngram: int, max_ngram: int) -> int | None:
    """Return the position after the last earlier occurrence of the longest n-gram that ends the text."""
    for n in range(max_ngram, min_ngram - 1, -1):
        for at in range(len(text) - 1, n - 1, -1):
            if n <= len(text) and text[at - n : at] == text[-n:]:
                return at
    return None


def _find(index: NgramIndex, text: np.ndarray, low: int, high: int) -> int | None:
    index.extend(text)
    found = (index.find(text[len(text) - n :].tobytes()) for n in range(min(high, len(text)), low - 1, -1))
    return next((at for at in found if at is not None), None)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("low", "high"), [(1, 1), (1, 3), (2, 4), (3, 6)])
def test_index_finds_what_a_search_finds(seed: int, low: int, high: int):
    """The index finds the same however the text grows."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, 3, 700).astype(np.int32)
    index, length = NgramIndex(range(low, high + 1), memory=10000), 0
    while length < len(text):
        length = min(len(text), length + int(rng.choice([1, 1, 1, 5, 40, 200])))
        assert _find(index, text[:length], low, high) == _search(text[:length].tolist(), low, high)


@pytest.mark.parametrize("memory", [1, 7, 64, 100])
def test_memory_is_bounded_and_as_long_as_promised(memory: int):
    rng = np.random.default_rng(0)
    text = rng.integers(0, 40, 3000).astype(np.int32)
    index, length = NgramIndex(range(2, 3), memory), 0
    while length < len(text):
        length = min(len(text), length + int(rng.choice([1, 1, 3, 90])))
        found, expected = _find(index, text[:length], 2, 2), _search(text[:length].tolist(), 2, 2)
        assert len(index._recent) + len(index._older) <= 2 * memory
        if expected is not None and expected >= length - memory:
            assert found == expected
        assert found in (expected, None)


def _draft(text: list[int], limit: int = 9, **fields: int) -> list[int]:
    drafter = NgramDrafter(NgramConfig.model_validate({"min_ngram": 2, "num_draft_tokens": 4} | fields), CONTEXT)
    tree = drafter.propose(make_decode_batch([make_running(0, text)], [limit]))
    return [token for token, _ in draft_of(tree, 0)]


def test_drafts_what_followed():
    assert _draft([5, 6, 7, 8, 9, 10, 5, 6]) == [7, 8, 9, 10]
    assert _draft([5, 6, 7, 8, 9, 10, 5, 6], num_draft_tokens=2) == [7, 8]
    assert _draft([5, 6, 7, 8, 9, 10, 5, 6], limit=3) == [7, 8, 9]
    assert _draft([5, 6, 7, 8, 9, 10, 11, 6]) == []
    assert _draft([5, 6, 7, 8, 9, 10, 11, 6], min_ngram=1) == []


def test_prefers_the_longest_match_then_the_latest():
    assert _draft([1, 2, 3, 9, 7, 2, 3, 8, 1, 2, 3])[0] == 9
    assert _draft([2, 3, 9, 7, 2, 3, 8, 6, 2, 3])[0] == 8


def test_repeats_what_goes_round():
    assert _draft([1, 4, 4, 4, 4], num_draft_tokens=6) == [4] * 6
    assert _draft([9, 1, 2, 3, 1, 2, 3], num_draft_tokens=7) == [1, 2, 3, 1, 2, 3, 1]


def test_reads_only_what_is_known():
    req = make_running(0, [1, 2, 3, 4, 1, 2])
    req.known_len = 4
    drafter = NgramDrafter(NgramConfig(), CONTEXT)
    assert drafter.propose(make_decode_batch([req], [9])) is None


def test_a_growing_request_gets_the_drafts_of_a_new_one():
    text = np.random.default_rng(0).integers(0, 3, 200).tolist()
    drafter = NgramDrafter(NgramConfig(min_ngram=2, num_draft_tokens=4), CONTEXT)
    req = make_running(0, text[:20])
    req.admitted.token_ids[:200] = text
    for known in range(20, 201):
        req.known_len = known
        assert [token for token, _ in draft_of(drafter.propose(make_decode_batch([req], [9])), 0)] == _draft(
            text[:known]
        )


def test_forget_drops_the_index():
    drafter = NgramDrafter(NgramConfig(), CONTEXT)
    req = make_running(3, [1, 2, 1, 2])
    drafter.propose(make_decode_batch([req], [9]))
    drafter.forget(req.departed)
    assert drafter._states == {}


def test_config_refuses_an_empty_range():
    with pytest.raises(ValidationError, match="min_ngram is 5; allowed: 1 up to max_ngram, 4"):
        NgramConfig(min_ngram=5)
