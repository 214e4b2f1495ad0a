"""Trees that grow by probability, against a search over paths.

Run: python -m pytest tests/plugins/test_eagle_trees.py
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail_speculative.tree_growth import TreeGrowth

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


def grown(seeds: list[int], topk: int, depths: list[int], counts: list[int], sharp: float):
    """The trees of rows, deepest first, grown as a drafter does; paths of the expanded nodes are kept beside."""
    first = [best_of((), topk, sharp, seed) for seed in seeds]
    growth = TreeGrowth(np.stack([f[0] for f in first]), np.stack([f[1] for f in first]), depths[0])
    paths = [[(int(token),) for token in f[0]] for f in first]
    for level in range(1, depths[0]):
        rows = sum(depth > level for depth in depths)
        growth.keep(rows)
        assert growth.tokens.shape == (rows, topk * level)
        assert growth.mask.shape == (rows, topk * level, topk * level)
        for row in range(rows):
            own = paths[row]
            assert growth.tokens[row].tolist() == [path[-1] for path in own]
            ancestors = [[b == a[: len(b)] for b in own] for a in own]
            assert growth.mask[row].tolist() == ancestors
        children = [[best_of(path, topk, sharp, seeds[row]) for path in paths[row][-topk:]] for row in range(rows)]
        ids = np.array([[c[0] for c in row] for row in children])
        parents = growth.grow(ids, np.array([[c[1] for c in row] for row in children]))
        for row in range(rows):
            newest = paths[row][-topk:]
            assert growth.tokens.shape[1] == topk * (level + 1)
            paths[row] += [
                (*newest[parent], int(token))
                for parent, token in zip(parents[row], growth.tokens[row, -topk:], strict=True)
            ]
    return growth.best(np.array(counts, np.int32))


def paths_of(tree, row: int) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for node in range(tree.lens[row]):
        parent = tree.parents[row, node]
        assert -1 <= parent < node, "parents come first"
        paths.append((*(paths[parent] if parent >= 0 else ()), int(tree.token_ids[row, node])))
    return paths


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 40)), min_size=1, max_size=4),
    topk=st.integers(2, 4),
    sharp=st.sampled_from([0.1, 1.0, 5.0, 40.0]),
    seed=st.integers(0, 10**6),
)
def test_trees_are_the_most_probable_ones(rows, topk, sharp, seed):
    depths, counts = (list(x) for x in zip(*sorted(rows, reverse=True), strict=True))
    seeds = [seed + row for row in range(len(rows))]
    tree = grown(seeds, topk, depths, counts, sharp)
    for row, (depth, count) in enumerate(zip(depths, counts, strict=True)):
        expected = searched(seeds[row], topk, depth, count, sharp)
        found = paths_of(tree, row)
        assert len(found) == len(set(found)) == len(expected)
        if sharp < 40:  # beyond, children are as probable as their parents to the last bit
            assert set(found) == expected


def test_a_child_as_probable_as_its_parent_comes_after_it():
    """Probabilities of one leave ties everywhere."""
    growth = TreeGrowth(np.array([[1, 2]], np.int32), np.array([[0.0, -5.0]], np.float32), 3)
    for _ in range(2):
        growth.grow(np.array([[[3, 4], [5, 6]]], np.int32), np.array([[[0.0, -9.0], [0.0, -9.0]]], np.float32))
    tree = growth.best(np.array([3], np.int32))
    assert paths_of(tree, 0) == [(1,), (1, 3), (1, 3, 3)]
