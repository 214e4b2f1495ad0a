"""Test that drafts with low stated probabilities are not verified, against a search over paths.

Run: python -m pytest -q tests/core/test_draft_probabilities.py
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.scheduler.drafts import checked
from dovetail.scheduler.limits import SchedulerLimits
from dovetail.types import DraftTree

VOCAB = 9
Node = tuple[int, int, float]
"""Token, parent and probability of a node."""


def batch(rows: int, limit: int = 99) -> SimpleNamespace:
    return SimpleNamespace(slots=np.zeros(rows, np.int32), draft_limits=np.full(rows, limit, np.int32))


def drafted(rows: list[list[Node]], *, spare: int = 2) -> DraftTree:
    """Return a tree with junk where a row has no draft."""
    shape = len(rows), max(map(len, rows)) + spare
    ids, parents, probs = np.full(shape, -7, np.int32), np.full(shape, 70, np.int32), np.full(shape, np.nan, np.float32)
    for row, nodes in enumerate(rows):
        for place, node in enumerate(nodes):
            ids[row, place], parents[row, place], probs[row, place] = node
    return DraftTree(ids, parents, np.array([len(nodes) for nodes in rows], np.int32), probs)


def chain(ids, lens, probs) -> DraftTree:
    return replace(DraftTree.chains(ids, lens), probs=probs)


def paths(tree: DraftTree | None, row: int) -> list[list[int]]:
    """Return for each node, in order, the tokens from the root to it."""
    found: list[list[int]] = []
    if tree is not None:
        for place, (token, parent) in enumerate(
            zip(tree.token_ids[row].tolist(), tree.parents[row].tolist(), strict=True)
        ):
            if place < tree.lens[row]:
                found.append([*(found[parent] if parent >= 0 else []), token])
            else:
                assert token == 0
                assert -1 <= parent < place, "entries that are not drafts may be read, although they have no effect"
    return found


@st.composite
def node_lists(draw) -> list[Node]:
    """Draw trees whose children may have higher probabilities than their parents."""
    count = draw(st.integers(0, 12))
    likely = st.sampled_from([0.0, 0.05, 0.2, 0.5, 1.0])
    return [(draw(st.integers(0, VOCAB - 1)), draw(st.integers(-1, i - 1)), draw(likely)) for i in range(count)]


@given(rows=st.lists(node_lists(), min_size=1, max_size=5), floor=st.sampled_from([1e-46, 1e-6, 0.05, 0.1, 0.5, 1.0]))
def test_what_is_left_are_the_paths_on_which_everything_is_likely(rows, floor):
    kept = checked(batch(len(rows)), drafted(rows), VOCAB, floor)
    for row, nodes in enumerate(rows):
        whole: list[list[tuple[int, np.float32]]] = []
        for token, parent, p in nodes:
            whole.append([*(whole[parent] if parent >= 0 else []), (token, np.float32(p))])
        likely = [path for path in whole if all(p >= np.float32(floor) for _, p in path)]
        assert paths(kept, row) == [[token for token, _ in path] for path in likely]
    if kept is not None:
        assert {array.dtype for array in (kept.token_ids, kept.parents, kept.lens)} == {np.dtype(np.int32)}
        assert kept.token_ids.shape[1] == kept.lens.max() > 0


@given(lens=st.lists(st.integers(0, 6), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_chains_stay_chains(lens, seed):
    probs = np.sort(np.random.default_rng(seed).random((len(lens), 6)).astype(np.float32))[:, ::-1]
    ids = np.tile(np.arange(6, dtype=np.int32), (len(lens), 1))
    kept = checked(batch(len(lens)), chain(ids, np.array(lens, np.int32), probs), VOCAB, 0.4)
    left = [int((probs[row, :count] >= 0.4).sum()) for row, count in enumerate(lens)]
    if not any(left):
        assert kept is None
        return
    assert kept is not None
    assert kept.is_chain
    assert kept.lens.tolist() == left
    for row, count in enumerate(left):
        assert kept.token_ids[row, :count].tolist() == list(range(count))


def test_a_tree_of_which_a_chain_is_left_is_one():
    tree = drafted([[(1, -1, 0.9), (2, -1, 0.01), (3, 0, 0.8)]], spare=0)
    assert not tree.is_chain
    kept = checked(batch(1), tree, VOCAB, 0.05)
    assert kept is not None
    assert kept.is_chain
    assert kept.token_ids.tolist() == [[1, 3]]


@pytest.mark.parametrize("probs", [[[0.5, 1.5]], [[-0.1, 0.5]], [[float("nan"), 0.5]], [[float("inf"), 0.5]]])
def test_what_is_no_probability_is_refused(probs):
    ids, lens = np.array([[1, 2]], np.int32), np.array([2], np.int32)
    with pytest.raises(ValueError, match="allowed: 0 to 1"):
        checked(batch(1), chain(ids, lens, np.array(probs, np.float32)), VOCAB, 0.1)


@pytest.mark.parametrize("shape", [(1,), (1, 3), (2, 2), (1, 2, 1)])
def test_probabilities_of_something_else_are_refused(shape):
    ids, lens = np.array([[1, 2]], np.int32), np.array([2], np.int32)
    with pytest.raises(ValueError, match=r"allowed: the shape of token_ids, \(1, 2\)"):
        checked(batch(1), chain(ids, lens, np.ones(shape, np.float32)), VOCAB, 0.1)


@pytest.mark.parametrize("floor", [1e-46, 1e-9, 0.5])
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_a_row_without_drafts_gets_none(dtype, floor):
    tree = drafted([[(1, -1, 1.0), (2, 0, 1.0)], []])
    assert tree.probs is not None
    kept = checked(batch(2), replace(tree, probs=tree.probs.astype(dtype)), VOCAB, floor)
    assert kept is not None
    assert kept.lens.tolist() == [2, 0]


def test_drafts_without_probabilities_are_refused_where_these_decide():
    ids, lens = np.array([[1, 2]], np.int32), np.array([2], np.int32)
    with pytest.raises(ValueError, match="have no probs, which scheduler"):
        checked(batch(1), DraftTree.chains(ids, lens), VOCAB, 0.1)


def test_without_a_least_probability_all_are_verified():
    kept = checked(batch(1), drafted([[(1, -1, 0.0), (2, -1, 0.0)]]), VOCAB, 0.0)
    assert kept is not None
    assert kept.lens.tolist() == [2]


def test_drafts_cut_by_their_probabilities_do_not_also_adapt_to_what_is_accepted():
    limits = SchedulerLimits(
        max_running=1, max_waiting=1, chunk_size=1, context_len=9, vocab_size=VOCAB, adapt_drafts=True
    )
    tree = DraftTree.chains(np.array([[1, 2]], np.int32), np.array([2], np.int32))
    assert limits.adapts(tree)
    assert not replace(limits, min_draft_probability=0.1).adapts(tree)
