"""Compare trees that grow by probability with a search over paths, and with growth on the host one row at a time.

Run: python -m pytest tests/plugins/test_eagle_trees.py
"""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.types import Batch, PageUpdates
from dovetail_speculative.config import TreeShape
from dovetail_speculative.eagle import fitted
from dovetail_speculative.tree_growth import Trees, TreeSteps, best_of

VOCAB = 50
NOTHING = np.zeros(0, np.int32)
Path = tuple[int, ...]


class Texts:
    """Model paths: the prediction after a node depends on the seed of its row and on the tokens on the path to it.

    An output is the number of a path.
    """

    def __init__(self, sharp: float) -> None:
        self.sharp = sharp
        self.numbers: dict[tuple[int, Path], int] = {}

    def number(self, seed: int, path: Path) -> int:
        return self.numbers.setdefault((seed, path), len(self.numbers))

    def logprobs(self, seed: int, path: Path) -> np.ndarray:
        logits = np.random.default_rng([seed, *path]).normal(size=VOCAB) * self.sharp
        return (logits - np.log(np.exp(logits).sum())).astype(np.float32)

    def best(self, outputs: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the children of each output. See ``TreeSteps``. An output that is not the number of a path belongs to
        a node that its row does not have."""
        paths = {number: key for key, number in self.numbers.items()}
        values = [self.logprobs(*paths[int(x)]) if int(x) in paths else np.zeros(VOCAB) for x in outputs[:, 0].tolist()]
        ids = [np.argsort(-row, kind="stable")[:topk] for row in values]
        scores = [row[chosen] for row, chosen in zip(values, ids, strict=True)]
        return torch.from_numpy(np.stack(ids)), torch.from_numpy(np.stack(scores)).float()

    def children(self, seed: int, path: Path, topk: int) -> list[tuple[Path, np.float32]]:
        values = self.logprobs(seed, path)
        return [((*path, int(token)), values[token]) for token in np.argsort(-values, kind="stable")[:topk]]


def searched(texts: Texts, seed: int, topk: int, depth: int, count: int) -> set[Path]:
    """Return the paths of EAGLE-2's tree."""
    scores: dict[Path, np.float32] = {(): np.float32(0)}
    frontier: list[Path] = [()]
    for _ in range(depth):
        born = {child: scores[path] + value for path in frontier for child, value in texts.children(seed, path, topk)}
        scores |= born
        frontier = sorted(born, key=born.__getitem__, reverse=True)[:topk]
    del scores[()]
    return set(sorted(scores, key=scores.__getitem__, reverse=True)[:count])


class Growing:
    """Grow trees of rows, deepest first, pass by pass. The model in it checks its inputs."""

    def __init__(self, texts: Texts, shape: TreeShape, seeds: list[int], widths: list[int], depths: list[int]) -> None:
        self.texts, self.seeds, self.widths = texts, seeds, widths
        self.steps = TreeSteps(shape, self.step, lambda x: texts.best(x, shape.topk), lambda n: torch.zeros(n, 1) - 1)
        self.depths = np.array(depths, np.int32)
        self.paths: list[list[Path]] = []
        self.index = torch.zeros(0)

    def grown(self, *, padding: int = 0) -> Trees:
        """Grow the trees. With ``padding``, the passes have that many additional rows, and tokens to fill them up."""
        starts, widths = 100 * np.arange(len(self.seeds), dtype=np.int32), np.array(self.widths, np.int32)
        roots = torch.tensor([[float(self.texts.number(seed, ()))] for seed in self.seeds])
        trees = self.steps.begin(roots, torch.from_numpy(widths), torch.from_numpy(self.depths))
        state = Trees(*(torch.cat((own, more)) for own, more in zip(trees, self.steps.state(padding), strict=True)))
        for one in self.steps.passes(starts, widths, self.depths):
            rows = int((one.counts > 0).sum())
            self.check_positions(starts, one.counts, one.positions)
            part = Trees(*(tensor[: rows + padding] for tensor in state))
            self.run(one.kind, rows, one.counts[:rows], part, padding)
        return Trees(*(tensor[: len(self.seeds)] for tensor in state))

    def run(self, kind: int, rows: int, counts: np.ndarray, part: Trees, padding: int) -> None:
        level, stride = kind + 1, self.steps.widths[-1]
        self.paths = [self.expanded(part, row, level) for row in range(rows)]
        index = [row * stride + i for row in range(rows) for i in range(counts[row])]
        fill = (rows + padding) * self.steps.widths[kind] - len(index) if padding else 0
        self.index = torch.tensor(index + [0] * fill)
        ends = np.concatenate([np.cumsum(counts), sum(counts) + 1 + np.arange(fill)])
        batch = Batch([], 0, NOTHING, NOTHING, NOTHING, NOTHING > 0, PageUpdates(NOTHING, NOTHING, NOTHING[None]))
        batch.qo_indptr = torch.from_numpy(np.minimum(np.concatenate([[0], ends]), len(self.index)).astype(np.int32))
        self.steps.run(kind, batch, self.index, part)

    def expanded(self, trees: Trees, row: int, level: int) -> list[Path]:
        """Return the paths of a row's nodes, by what they see."""
        count = self.widths[row] * level
        tokens, seen = trees.tokens[row, :count].tolist(), trees.seen[row, :count, :count]
        assert not trees.seen[row, :count, count:].any()
        paths = [tuple(tokens[j] for j in seen[i].nonzero()[:, 0].tolist()) for i in range(count)]
        assert len(set(paths)) == count
        assert [len(path) for path in paths] == [1 + i // self.widths[row] for i in range(count)]
        return paths

    def check_positions(self, starts: np.ndarray, counts: np.ndarray, positions: np.ndarray) -> None:
        expected = [starts[row] + i // self.widths[row] for row in range(len(counts)) for i in range(counts[row])]
        assert positions.tolist() == expected

    def step(self, batch: Batch, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        nodes = [(seed, path) for seed, own in zip(self.seeds, self.paths, strict=False) for path in own]
        assert ids[: len(nodes)].tolist() == [path[-1] for _, path in nodes]
        before = [[self.texts.number(seed, path[:-1])] for seed, path in nodes]
        assert hidden[: len(nodes)].tolist() == before, "a node goes on from its parent's output"
        found = torch.full((len(ids), 1), -1.0)
        found[: len(nodes), 0] = torch.tensor([float(self.texts.number(seed, path)) for seed, path in nodes])
        return found


def paths_of(found: torch.Tensor) -> list[Path]:
    """Return the paths of a row of ``best_of``."""
    count, most = int(found[0]), len(found) // 3
    paths: list[Path] = []
    for token, parent in zip(found[1 : 1 + count].tolist(), found[1 + most : 1 + most + count].tolist(), strict=True):
        assert -1 <= parent < len(paths), "parents come first"
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@settings(max_examples=120)
@given(
    rows=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 4)), min_size=1, max_size=4),
    topk=st.integers(2, 4),
    sharp=st.sampled_from([0.1, 1.0, 5.0, 40.0]),
    seed=st.integers(0, 10**6),
    padding=st.integers(0, 2),
)
def test_trees_are_the_most_probable_ones(rows, topk, sharp, seed, padding):
    depths, counts, widths = (list(x) for x in zip(*sorted(rows, reverse=True), strict=True))
    widths = [min(width, topk) for width in widths]
    seeds = [seed + row for row in range(len(rows))]
    texts = Texts(sharp)
    growing = Growing(texts, TreeShape(topk, depths[0]), seeds, widths, depths)
    most = min(max(counts), growing.steps.candidates)
    found = best_of(growing.grown(padding=padding), torch.tensor(counts), most)
    for row, (depth, count) in enumerate(zip(depths, counts, strict=True)):
        expected = searched(texts, seeds[row], widths[row], depth, count)
        paths = paths_of(found[row])
        assert len(paths) == len(set(paths)) == len(expected)
        stated = found[row, 1 + 2 * most :][: len(paths)].int().view(torch.float32)
        logprobs = [sum(texts.logprobs(seeds[row], path[:i])[path[i]] for i in range(len(path))) for path in paths]
        assert np.allclose(stated.numpy(), np.exp(logprobs), rtol=1e-4)
        if sharp < 40:  # beyond, children are as probable as their parents to the last bit
            assert set(paths) == expected


def test_a_child_as_probable_as_its_parent_comes_after_it():
    """Probabilities of one make ties everywhere."""
    shape = TreeShape(2, 3)
    first = torch.tensor([[1, 2]]), torch.tensor([[0.0, -5.0]])
    steps = TreeSteps(shape, lambda batch, ids, hidden: hidden, lambda x: first, lambda n: torch.zeros(n, 1))
    trees = steps.begin(torch.zeros(1, 1), torch.tensor([2]), torch.tensor([3]))
    for level in (1, 2):
        steps.grow(trees, level, torch.tensor([[[3, 4], [5, 6]]]), torch.tensor([[[0.0, -9.0], [0.0, -9.0]]]))
    assert paths_of(best_of(trees, torch.tensor([3]), 3)[0]) == [(1,), (1, 3), (1, 3, 3)]


def test_a_score_that_is_no_number_is_no_candidate():
    shape = TreeShape(2, 2)
    first = torch.tensor([[1, 2]]), torch.tensor([[-0.1, -5.0]])
    steps = TreeSteps(shape, lambda batch, ids, hidden: hidden, lambda x: first, lambda n: torch.zeros(n, 1))
    trees = steps.begin(torch.zeros(1, 1), torch.tensor([2]), torch.tensor([2]))
    scores = torch.tensor([[[torch.nan, torch.nan], [-0.5, -9.0]]])
    steps.grow(trees, 1, torch.tensor([[[3, 4], [5, 6]]]), scores)
    assert paths_of(best_of(trees, torch.tensor([3]), 3)[0]) == [(1,), (2,), (2, 5)]


@given(limits=st.lists(st.integers(1, 80), min_size=1, max_size=5), topk=st.integers(2, 10), depth=st.integers(1, 8))
def test_trees_fit_into_the_pages_there_are(limits, topk, depth):
    """Expanded nodes have pages, no tree is deeper than its number of drafts, the full limit gives the full tree, and
    trees with larger limits are no shallower."""
    shape = TreeShape(topk, depth)
    limits = sorted(limits, reverse=True)
    widths, depths = fitted(shape, np.array(limits, np.int32))
    assert (depths[1:] <= depths[:-1]).all()
    for limit, width, deep in zip(limits, widths, depths, strict=True):
        assert 1 <= width <= topk
        assert 1 <= deep <= min(depth, limit)
        assert width * (deep - 1) <= limit + 1
        if limit >= max(shape.nodes - 1, depth, topk):
            assert (width, deep) == (topk, depth)
