"""Test in which cache groups a decode step reads shared prefixes once, and how many tokens that saves.

.venv/bin/python -m pytest -q tests/core/test_prefix_sharing.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.engine.engine import Engine
from dovetail.engine.grouped import grouped_attention
from dovetail.engine.inputs import shared_by_group
from dovetail.engine.sharing import NO_SHARING, PrefixSharing
from dovetail.interfaces.attention import AttentionBackend
from dovetail.testing.batches import make_batch
from dovetail.types import SharedPrefixes

PAGE = 4


class Asked(AttentionBackend):
    """Answer that sharing pays from ``least`` saved tokens on."""

    def __init__(self, least: int) -> None:
        self.least, self.seen = least, []

    def plan(self, batch: Any) -> None:
        raise NotImplementedError

    def forward(self, q: Any, layer: Any, batch: Any) -> Any:
        raise NotImplementedError

    def shares(self, batch: Any) -> bool:
        self.seen.append((batch.shared.window, batch.shared.saved))
        return batch.shared.saved >= self.least


def decode_batch(prefix: list[int], starts: list[int], lens: list[int]) -> Any:
    batch = make_batch(PAGE, np.zeros((len(prefix), 50), np.int32), prefix, [1] * len(prefix))
    batch.shared = SharedPrefixes(np.array(starts, np.int32), np.array(lens, np.int32))
    return batch


@given(
    groups=st.lists(st.tuples(st.integers(0, 20), st.lists(st.integers(0, 60), min_size=1, max_size=5)), max_size=5),
    window=st.one_of(st.none(), st.integers(1, 90)),
)
def test_saved_tokens_are_those_that_several_rows_see(groups: list[tuple[int, list[int]]], window: int | None) -> None:
    """A set of the keys that each row sees is the reference."""
    positions, starts, lens, saved = [], [0], [], 0
    for pages, owns in groups:
        length = PAGE * pages
        rows = [length + own for own in owns]
        seen = [{key for key in range(length) if window is None or key > row - window} for row in rows]
        saved += sum(map(len, seen)) - len(set().union(*seen))
        positions += rows
        starts.append(len(positions))
        lens.append(length)
    arrays = np.array(starts, np.int32), np.array(lens, np.int32)
    shared = SharedPrefixes(*arrays, window, None if window is None else np.array(positions, np.int32))
    assert shared.saved == saved


@pytest.mark.parametrize(
    ("least", "level", "asked"),
    [
        ((0, 0, 0), 3, [(None, 80), (30, 30), (20, 10)]),
        ((81, 0, 0), 0, [(None, 80)]),
        ((80, 0, 31), 1, [(None, 80), (30, 30)]),
        ((80, 11, 30), 2, [(None, 80), (30, 30), (20, 10)]),
    ],
)
def test_the_groups_that_see_the_most_share_as_far_as_it_pays(
    least: tuple[int, int, int], level: int, asked: list[tuple[int | None, int]]
) -> None:
    """The third group has the larger window. Rows of one group are at 44, 50 and 58 after 40 tokens that they share."""
    sharing = PrefixSharing([None, 20, 30], [0, 2, 1])
    members = [Asked(count) for count in least]
    batch = decode_batch([44, 50, 58, 7], [0, 3, 4], [40, 0])
    chosen = sharing.choose(batch, grouped_attention(members))
    assert [seen for at in (0, 2, 1) for seen in members[at].seen] == asked
    assert (0 if chosen is None else chosen.level) == level
    first, *others = shared_by_group(chosen, 3)
    assert first is None or first.window is None
    for other, window, least_level in zip(others, (20, 30), (3, 2), strict=True):
        assert (other is not None) == (level >= least_level)
        if other is not None:
            assert other.window == window
            assert other.positions is not None
            assert other.positions.tolist() == [44, 50, 58, 7]
            assert (other.starts.tolist(), other.lens.tolist()) == ([0, 3, 4], [40, 0])


def test_the_only_group_may_have_a_window() -> None:
    sharing = PrefixSharing([30], [0])
    batch = decode_batch([44, 50], [0, 2], [40])
    assert sharing.choose(batch, Asked(20)) is None
    chosen = sharing.choose(batch, Asked(19))
    assert chosen is not None
    assert (chosen.window, chosen.level, chosen.saved, chosen.others) == (30, 1, 19, ())


def test_nothing_is_shared_where_no_group_may() -> None:
    assert NO_SHARING.choose(decode_batch([44, 50], [0, 2], [40]), Asked(0)) is None
    assert NO_SHARING.levels == (0,)


def test_a_captured_step_follows_the_lengths_of_each_step() -> None:
    """The level of a graph is fixed; host lengths of all groups are those of the step."""
    sharing = PrefixSharing([None, 20, 30], [0, 2, 1])
    zeros = np.zeros(2, np.int32)
    static = sharing.at(2, np.arange(3, dtype=np.int32), zeros, zeros)
    step = sharing.at(2, np.array([0, 2], np.int32), np.array([40], np.int32), np.array([44, 50], np.int32))
    assert static is not None
    assert step is not None
    static.follow(step)
    assert (static.saved, static.level) == (40, 2)
    assert static.others[0] is None
    assert static.others[1] is not None
    assert static.others[1].saved == 19


@pytest.mark.parametrize(("sharing", "shares"), [(NO_SHARING, False), (PrefixSharing([None, 20], [0]), True)])
def test_an_engine_shares_prefixes_if_a_cache_group_may(sharing: PrefixSharing, shares: bool) -> None:
    """It is derived from ``Engine.sharing``, so that an engine that stands in for another sets one of both."""
    engine = Engine.__new__(Engine)
    engine.sharing = sharing
    assert engine.shares_prefixes is shares
