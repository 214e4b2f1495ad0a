"""Test the bitmasks of a batch: the masks of one backend are filled in one call.

.venv/bin/python -m pytest -q tests/core/test_masks.py
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from dovetail.constraints.masks import fill_masks
from dovetail.engine.masks import MaskBuffers, mask_logits
from dovetail.interfaces.grammar import GrammarBackend, Matcher
from dovetail.testing.batches import make_batch
from dovetail.types import DraftTree

VOCAB = 70


class Only(Matcher):
    """Allow one token; raise if it is negative."""

    def __init__(self, token, wraps=False):
        self.token, self.wraps = token, wraps

    @property
    def inner(self):
        return None if self.wraps else self

    def fill_bitmask(self, bitmask, row):
        if self.token < 0:
            raise KeyError("odd")
        bitmask[row] = 0
        bitmask[row, self.token // 32] = np.int64(1 << self.token % 32).astype(np.int32)

    def accept(self, token_id):
        return True

    def rollback(self, num_tokens):
        pass

    @property
    def is_terminated(self):
        return False


class Backend(GrammarBackend):
    def __init__(self):
        self.calls = []

    def compile(self, spec):
        raise NotImplementedError

    def fill_bitmasks(self, matchers, bitmask, rows):
        self.calls.append(len(matchers))
        super().fill_bitmasks(matchers, bitmask, rows)


def filled(batch, reqs):
    return fill_masks(batch, reqs, -(-VOCAB // 32), MaskBuffers(torch.device("cpu")).take)


def masked(reqs):
    batch = make_batch(4, np.zeros((len(reqs) + 1, 4), np.int32), [3] * (len(reqs) + 1), [1] * (len(reqs) + 1))
    logits = torch.zeros(len(reqs) + 1, VOCAB)
    mask_logits(logits, filled(batch, [req(None, None), *reqs]))
    assert (logits[0] == 0).all()  # a row without a grammar
    return [(row > -1e9).nonzero()[:, 0].tolist() for row in logits[1:]]


def req(matcher, backend):
    return SimpleNamespace(rid="r", matcher=matcher, masks=backend, error=None, meter=None, finish=None)


def test_each_backend_is_called_once():
    one, two = Backend(), Backend()
    reqs = [req(Only(3), one), req(Only(40), two), req(Only(69), one), req(Only(33), two), req(Only(8), None)]
    assert masked(reqs) == [[3], [40], [69], [33], [8]]
    assert (one.calls, two.calls) == ([2], [2])


def test_a_wrapper_that_decides_for_itself_is_asked_itself():
    backend = Backend()
    assert masked([req(Only(3, wraps=True), backend), req(Only(4), backend), req(Only(5), backend)]) == [[3], [4], [5]]
    assert backend.calls == [2]


def test_of_a_call_that_fails_only_the_culprit_ends():
    backend = Backend()
    reqs = [req(Only(3), backend), req(Only(-1), backend), req(Only(5), backend)]
    assert masked(reqs) == [[3], list(range(VOCAB)), [5]]
    assert [r.error is None for r in reqs] == [True, False, True]
    assert "odd" in reqs[1].error


def test_rows_of_drafts_of_a_matcher_that_fails_allow_everything():
    drafts = DraftTree(np.array([[7, 8]], np.int32), np.array([[-1, 0]], np.int32), np.array([2], np.int32))
    batch = make_batch(4, np.zeros((1, 4), np.int32), [3], [3], drafts=drafts)
    logits = torch.zeros(3, VOCAB)
    failing = req(Only(-1), Backend())
    mask_logits(logits, filled(batch, [failing]))
    assert (logits == 0).all()
    assert "odd" in failing.error


def allowed(row):
    return [token for token in range(VOCAB) if row[token // 32] >> (token % 32) & 1]


def test_masks_name_their_rows_of_logits_and_leave_out_rows_that_have_ended_or_are_not_sampled():
    """Two prompts, of which one is not sampled, stand before rows of two drafts, of none, and of one."""
    drafts = DraftTree(
        np.array([[0, 0], [0, 0], [7, 8], [0, 0], [9, 0]], np.int32),
        np.array([[-1, 0]] * 5, np.int32),
        np.array([0, 0, 2, 0, 1], np.int32),
    )
    batch = make_batch(4, np.zeros((5, 4), np.int32), [0, 0, 3, 3, 3], [2, 2, 3, 1, 2], num_extend=2, drafts=drafts)
    batch.samples = np.array([False, True, True, True, True])
    backend = Backend()
    reqs = [req(Only(token), backend) for token in (1, 2, 3, 4, 5)]
    reqs[3].finish = "over"
    masks = filled(batch, reqs)
    assert masks.logit_rows.tolist() == [0, 1, 2, 3, 5, 6]
    assert [allowed(row) for row in masks.bits.tolist()] == [[2], [3], [3], [3], [5], [5]]
    assert backend.calls == [3]
    reqs[4].matcher = None
    assert filled(batch, reqs).logit_rows.tolist() == [0, 1, 2, 3]


def test_there_are_no_masks_without_a_row_that_needs_one():
    batch = make_batch(4, np.zeros((2, 4), np.int32), [3, 3], [1, 1])
    ended = req(Only(3), Backend())
    ended.finish = "over"
    asked = []
    assert fill_masks(batch, [ended, req(None, None)], 3, lambda *shape: asked.append(shape)) is None
    assert not asked
