"""The n-gram drafter: the suite, and each draft against a plain search of the text.

Run: python -m pytest -q tests/plugins/test_ngram.py
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from dovetail.interfaces.speculative import Drafter, DrafterContext
from dovetail.testing.drafter import DrafterSuite, draft_of, make_decode_batch, make_running
from dovetail.types import Batch, DraftTree, Req
from dovetail_speculative.config import NgramConfig
from dovetail_speculative.ngram import NgramDrafter
from dovetail_speculative.ngram_index import NgramIndex

CONTEXT = DrafterContext(torch.device("cpu"), vocab_size=64, max_rows=16, max_context=256)


class TestNgram(DrafterSuite):
    name = "ngram"


class TestNgramLongDrafts(DrafterSuite):
    name = "ngram"
    settings = {"num_draft_tokens": 16, "min_ngram": 1, "memory": 8}  # noqa: RUF012


def _search(text: list[int], min_ngram: int, max_ngram: int) -> int | None:
    """The position after the last earlier occurrence of the longest n-gram that ends the text."""
    for n in range(max_ngram, min_ngram - 1, -1):
        for at in range(len(text) - 1, n - 1, -1):
            if n <= len(text) and text[at - n : at] == text[-n:]:
                return at
    return None


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("low", "high"), [(1, 1), (1, 3), (2, 4), (3, 6)])
def test_index_finds_what_a_search_finds(seed: int, low: int, high: int):
    """However the text grows: by one token, by some, or by more than a loop is used for."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, 3, 700).astype(np.int32)
    index, length = NgramIndex(low, high, memory=10000), 0
    while length < len(text):
        length = min(len(text), length + int(rng.choice([1, 1, 1, 5, 40, 200])))
        assert index.find(text[:length]) == _search(text[:length].tolist(), low, high)


@pytest.mark.parametrize("memory", [1, 7, 64, 100])
def test_memory_is_bounded_and_as_long_as_promised(memory: int):
    rng = np.random.default_rng(0)
    text = rng.integers(0, 40, 3000).astype(np.int32)
    index, length = NgramIndex(2, 2, memory), 0
    while length < len(text):
        length = min(len(text), length + int(rng.choice([1, 1, 3, 90])))
        found, expected = index.find(text[:length]), _search(text[:length].tolist(), 2, 2)
        assert len(index._recent) + len(index._older) <= 2 * memory
        if expected is not None and expected >= length - memory:
            assert found == expected
        assert found in (expected, None)


def test_equal_keys_of_other_tokens_are_no_match():
    index = NgramIndex(1, 2, memory=100)
    index.find(np.array([1, 2, 3], dtype=np.int32))
    for table in (index._recent, index._older):
        table.update(dict.fromkeys(index._keys([8, 9]), 2))  # as if [8, 9] and [1, 2] had the same key
    assert index.find(np.array([1, 2, 3, 8, 9], dtype=np.int32)) is None


def _draft(text: list[int], room: int = 9, **fields: int) -> list[int]:
    drafter = NgramDrafter(NgramConfig.model_validate(fields), CONTEXT)
    tree = drafter.propose(make_decode_batch([make_running(0, text)], [room]))
    return [token for token, _ in draft_of(tree, 0)]


def test_drafts_what_followed():
    assert _draft([5, 6, 7, 8, 9, 10, 5, 6]) == [7, 8, 9, 10]
    assert _draft([5, 6, 7, 8, 9, 10, 5, 6], num_draft_tokens=2) == [7, 8]
    assert _draft([5, 6, 7, 8, 9, 10, 5, 6], room=3) == [7, 8, 9]
    assert _draft([5, 6, 7, 8, 9, 10, 11, 6]) == []
    assert _draft([5, 6, 7, 8, 9, 10, 11, 6], min_ngram=1) == [7, 8, 9, 10]


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
    drafter = NgramDrafter(NgramConfig(), CONTEXT)
    req = make_running(0, text[:20])
    req.token_ids[:200] = text
    for known in range(20, 201):
        req.known_len = req.device_len = known
        assert [token for token, _ in draft_of(drafter.propose(make_decode_batch([req], [9])), 0)] == _draft(
            text[:known]
        )


def test_forget_drops_the_index():
    drafter = NgramDrafter(NgramConfig(), CONTEXT)
    req = make_running(3, [1, 2, 1, 2])
    drafter.propose(make_decode_batch([req], [9]))
    drafter.forget(req)
    assert drafter._indices == {}


def test_config_refuses_an_empty_range():
    with pytest.raises(ValidationError, match="min_ngram is 5; allowed: 1 up to max_ngram, 4"):
        NgramConfig(min_ngram=5)


class _Greedy(NgramDrafter):
    """Drafts into room that nobody reserved."""

    def propose(self, batch: Batch) -> DraftTree | None:
        assert batch.draft_room is not None
        return super().propose(dataclasses.replace(batch, draft_room=batch.draft_room + 1))


class _DraftsForExtendRows(NgramDrafter):
    def propose(self, batch: Batch) -> DraftTree | None:
        return super().propose(dataclasses.replace(batch, num_extend=0))


class _NeverNone(NgramDrafter):
    def propose(self, batch: Batch) -> DraftTree | None:
        tree, rows = super().propose(batch), len(batch.reqs)
        none = np.zeros((rows, 1), dtype=np.int32)
        return tree or DraftTree(none, none - 1, np.zeros(rows, dtype=np.int32))


class _OutsideTheVocabulary(NgramDrafter):
    def propose(self, batch: Batch) -> DraftTree | None:
        tree = super().propose(batch)
        return tree and dataclasses.replace(tree, token_ids=tree.token_ids + 64)


class _ChildrenFirst(NgramDrafter):
    def propose(self, batch: Batch) -> DraftTree | None:
        tree = super().propose(batch)
        return tree and dataclasses.replace(tree, parents=tree.parents + 1)


class _UndeclaredTree(NgramDrafter):
    def propose(self, batch: Batch) -> DraftTree | None:
        tree = super().propose(batch)
        return tree and dataclasses.replace(tree, parents=np.full_like(tree.parents, -1))


class _ForgetsNothing(NgramDrafter):
    def forget(self, req: Req) -> None:
        return


class _MixesRowsUp(NgramDrafter):
    def propose(self, batch: Batch) -> DraftTree | None:
        tree = super().propose(batch)
        return tree and dataclasses.replace(tree, token_ids=np.ascontiguousarray(tree.token_ids[::-1]))


class _WritesItsDrafts(NgramDrafter):
    def propose(self, batch: Batch) -> DraftTree | None:
        tree = super().propose(batch)
        if tree is not None:
            for row, req in enumerate(batch.reqs):
                req.token_ids[req.known_len : req.known_len + tree.lens[row]] = tree.token_ids[row, : tree.lens[row]]
        return tree


@pytest.mark.parametrize(
    ("drafter_class", "test"),
    [
        (_Greedy, "test_drafts_are_valid_trees_within_their_room"),
        (_DraftsForExtendRows, "test_drafts_are_valid_trees_within_their_room"),
        (_NeverNone, "test_without_room_there_are_no_drafts"),
        (_OutsideTheVocabulary, "test_drafts_are_valid_trees_within_their_room"),
        (_ChildrenFirst, "test_drafts_are_valid_trees_within_their_room"),
        (_UndeclaredTree, "test_drafts_are_valid_trees_within_their_room"),
        (_ForgetsNothing, "test_what_is_forgotten_leaves_no_trace"),
        (_MixesRowsUp, "test_rows_are_independent"),
        (_WritesItsDrafts, "test_proposing_changes_no_request"),
    ],
)
def test_a_broken_drafter_fails_the_suite(drafter_class: type[NgramDrafter], test: str):
    class Suite(DrafterSuite):
        name = "ngram"

        def make(self) -> Drafter:
            return drafter_class(NgramConfig(), CONTEXT)

    def run_all() -> None:
        for arguments in [()] if test == "test_without_room_there_are_no_drafts" else [(seed,) for seed in range(8)]:
            getattr(Suite(), test)(*arguments)

    with pytest.raises(AssertionError):
        run_all()
