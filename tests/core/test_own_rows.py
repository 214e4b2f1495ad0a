"""Test which rows, tokens and saves of states of a step belong to a rank, with data-parallel attention.

.venv/bin/python -m pytest -q tests/core/test_own_rows.py
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dovetail.engine.captures import NO_UPDATES
from dovetail.engine.own_rows import kept, rows_of, tokens_of
from dovetail.types import Batch, DraftTree, StateSaves


def batch_of(rng: np.random.Generator, count: int) -> Batch:
    """Return a step of prompts, with saves within some of them in two groups, and of rows with drafts."""
    prompts, slots = int(rng.integers(0, count + 1)), rng.permutation(np.arange(1, 20))[:count].astype(np.int32)
    lens = rng.integers(2, 9, count).astype(np.int32)
    batch = Batch([], prompts, slots, lens * 3, lens, lens > 3, NO_UPDATES)
    drafts = np.where(np.arange(count) < prompts, 0, lens - 1).astype(np.int32)
    batch.drafts = DraftTree.chains(rng.integers(0, 99, (count, 8)).astype(np.int32), drafts)
    places = [(row, at) for row in range(prompts) for at in range(1, lens[row]) if rng.random() < 0.3]
    if places:
        rows, after = np.array(places, np.int32).T
        groups = np.repeat(np.array([0, 1], np.int32), len(rows))
        targets = rng.permutation(np.arange(1, 1 + 2 * len(rows))).astype(np.int32)
        batch.state_saves = StateSaves(np.tile(rows, 2), np.tile(after, 2), groups, targets)
    return batch


def saves_in(batch: Batch) -> set[tuple[int, ...]]:
    """Return the slot of the request, the length, the group and the target of each save."""
    if batch.state_saves is None:
        return set()
    rows, *rest = (array.tolist() for array in batch.state_saves)
    return set(zip(batch.slots[rows].tolist(), *rest, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_ranks_divide_the_rows_of_a_step(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch, ranks = batch_of(rng, int(rng.integers(1, 9))), int(rng.integers(2, 4))
    starts = np.cumsum(batch.extend_lens) - batch.extend_lens
    slots, saves, tokens = list[int](), list[tuple[int, ...]](), list[int]()
    for rank in range(ranks):
        tp: Any = SimpleNamespace(rank=rank, size=ranks)
        rows = kept(batch.slots, tp)
        own = rows_of(batch, rows)
        assert all((slot - 1) % ranks == rank for slot in own.slots)
        assert own.num_extend == sum(row < batch.num_extend for row in rows.tolist())
        for name in ("prefix_lens", "extend_lens", "samples"):
            assert (getattr(own, name) == getattr(batch, name)[rows]).all()
        assert batch.drafts is not None
        for place, row in enumerate(rows.tolist()):
            drafts = [] if own.drafts is None else own.drafts.row(place)[0]
            assert list(drafts) == list(batch.drafts.row(row)[0])
        expected = [starts[row] + i for row in rows.tolist() for i in range(batch.extend_lens[row])]
        assert tokens_of(batch, rows).tolist() == expected
        slots, tokens = [*slots, *own.slots.tolist()], [*tokens, *expected]
        saves += saves_in(own)
    assert sorted(slots) == sorted(batch.slots.tolist())
    assert sorted(tokens) == list(range(batch.extend_lens.sum()))
    assert len(saves) == len(set(saves))
    assert set(saves) == saves_in(batch)
