"""Broken drafters, each of which must fail the conformance suite of drafters.

Run: python -m pytest -q tests/plugins/test_ngram_broken.py
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from dovetail.interfaces.speculative import Drafter, DrafterContext
from dovetail.testing.drafter import DrafterSuite
from dovetail.types import Batch, DraftTree, Req
from dovetail_speculative.config import NgramConfig
from dovetail_speculative.ngram import NgramDrafter

CONTEXT = DrafterContext(torch.device("cpu"), vocab_size=64, max_rows=16, max_context=256)


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
            return drafter_class(NgramConfig(shared=0), CONTEXT)

    def run_all() -> None:
        for arguments in [()] if test == "test_without_room_there_are_no_drafts" else [(seed,) for seed in range(8)]:
            getattr(Suite(), test)(*arguments)

    with pytest.raises(AssertionError):
        run_all()
