"""Trees that grow by probability, against a search over paths.

Run: python -m pytest tests/plugins/test_eagle_trees.py
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail_speculative.config import TreeShape
from dovetail_speculative.eagle import fitted
from dovetail_speculative.tree_growth import Nodes, TreeGrowth

VOCAB = 50


def logprobs_of(path: tuple[int, ...], sharp: float, seed: int) -> np.ndarray:
    logits = np.random.default_rng([seed, *path]).normal(size=VOCAB) * sharp
    return logits - np.log(np.exp(logits).sum())


def best_of(path: tuple[int, ...], topk: int, sharp: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    values = logprobs_of(path, sharp, seed)
    ids = np.argsort(-values)[:topk]
    return ids.astype(np.int32), values[ids].astype(np.float32)


def searched(seed: int, topk: int, depth: int, count: int, sharp: float) -> set[tuple[int, ...]]:
    scores: dict[tuple[int, ...], np.float32] = {(): np.float32(0)}
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        born = {}
        for path in frontier:
            for token, value in zip(*best_of(path, topk, sharp, seed), strict=True):
                born[(*path, int(token))] = scores[path] + value
        scores |= born
        frontier = sorted(born, key=born.__getitem__, reverse=True)[:topk]
    del scores[()]
    return set(sorted(scores, key=scores.__getitem__, reverse=True)[:count])


def grown(seeds: list[int], topk: int, widths: list[int], depths: list[int], counts: list[int], sharp: float):
    """The trees of rows, deepest first, grown as a drafter does; paths of the expanded nodes are kept beside."""
    first = [best_of((), topk, sharp, seed) for seed in seeds]
    ids, scores = (np.stack([f[i] for f in first]) for i in (0, 1))
    growth = TreeGrowth(ids, scores, np.array(widths, np.int32), depths[0])
    paths = [[(int(token),) for token in f[0][:width]] for f, width in zip(first, widths, strict=True)]
    for level in range(1, depths[0]):
        rows = sum(depth > level for depth in depths)
        growth.keep(rows)
        nodes = growth.nodes
        check_nodes(nodes, paths[:rows], level, topk)
        everyone = [path for own in paths[:rows] for path in own]
        newest = [[everyone[i] for i in nodes.newest[row]] for row in range(rows)]
        children = [[best_of(path, topk, sharp, seeds[row]) for path in newest[row]] for row in range(rows)]
        ids, scores = (np.array([[c[i] for c in row] for row in children]) for i in (0, 1))
        parents = growth.grow(ids, scores)
        for row in range(rows):
            end = sum(widths[: row + 1]) * (level + 1)
            own = growth.nodes.tokens[end - widths[row] : end]
            paths[row] += [(*newest[row][parent], int(token)) for parent, token in zip(parents[row], own, strict=False)]
    return growth.best(np.array(counts, np.int32))


def check_nodes(nodes: Nodes, paths: list[list[tuple[int, ...]]], level: int, topk: int) -> None:
    """Nodes are those of ``paths``, row by row."""
    assert nodes.counts.tolist() == [len(own) for own in paths]
    everyone = [path for own in paths for path in own]
    assert nodes.tokens.tolist() == [path[-1] for path in everyone]
    assert nodes.level.tolist() == [len(path) - 1 for path in everyone]
    assert nodes.mask.shape == (len(everyone), max(len(own) for own in paths))
    for row, own in enumerate(paths):
        start = sum(len(other) for other in paths[:row])
        for i, path in enumerate(own):
            seen = [path[: len(other)] == other for other in own]
            assert nodes.mask[start + i].tolist() == seen + [False] * (nodes.mask.shape[1] - len(own))
            assert nodes.place[start + i] // (topk * level) == row
        width = len(own) // level
        assert [everyone[j] for j in nodes.newest[row, :width]] == own[-width:]


def paths_of(tree, row: int) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for node in range(tree.lens[row]):
        parent = tree.parents[row, node]
        assert -1 <= parent < node, "parents come first"
        paths.append((*(paths[parent] if parent >= 0 else ()), int(tree.token_ids[row, node])))
    return paths


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 4)), min_size=1, max_size=4),
    topk=st.integers(2, 4),
    sharp=st.sampled_from([0.1, 1.0, 5.0, 40.0]),
    seed=st.integers(0, 10**6),
)
def test_trees_are_the_most_probable_ones(rows, topk, sharp, seed):
    depths, counts, widths = (list(x) for x in zip(*sorted(rows, reverse=True), strict=True))
    widths = [min(width, topk) for width in widths]
    seeds = [seed + row for row in range(len(rows))]
    tree = grown(seeds, topk, widths, depths, counts, sharp)
    for row, (depth, count) in enumerate(zip(depths, counts, strict=True)):
        expected = searched(seeds[row], widths[row], depth, count, sharp)
        found = paths_of(tree, row)
        assert len(found) == len(set(found)) == len(expected)
        if sharp < 40:  # beyond, children are as probable as their parents to the last bit
            assert set(found) == expected


def test_a_child_as_probable_as_its_parent_comes_after_it():
    """Probabilities of one leave ties everywhere."""
    two = np.array([2], np.int32)
    growth = TreeGrowth(np.array([[1, 2]], np.int32), np.array([[0.0, -5.0]], np.float32), two, 3)
    for _ in range(2):
        growth.grow(np.array([[[3, 4], [5, 6]]], np.int32), np.array([[[0.0, -9.0], [0.0, -9.0]]], np.float32))
    tree = growth.best(np.array([3], np.int32))
    assert paths_of(tree, 0) == [(1,), (1, 3), (1, 3, 3)]


@given(limits=st.lists(st.integers(1, 80), min_size=1, max_size=5), topk=st.integers(2, 10), depth=st.integers(1, 8))
def test_trees_fit_into_the_pages_there_are(limits, topk, depth):
    """Nodes that are expanded have places, a tree is never deeper than its drafts are many, and full room gives the full tree."""
    shape = TreeShape(topk, depth)
    widths, depths = fitted(shape, np.array(limits, np.int32))
    for limit, width, deep in zip(limits, widths, depths, strict=True):
        assert 1 <= width <= topk
        assert 1 <= deep <= min(depth, limit)
        assert width * (deep - 1) <= limit + 1
        if limit >= max(shape.nodes - 1, depth, topk):
            assert (width, deep) == (topk, depth)
