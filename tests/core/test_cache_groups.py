"""Test what must exist to resume a request, token by token.

Run: python -m pytest -q tests/core/test_cache_groups.py
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dovetail.interfaces.cache import CacheGroupKind, GroupDescriptor, first_needed
from dovetail.interfaces.cache_groups import acceptable, resumable

FULL, LATENT = GroupDescriptor(), GroupDescriptor(CacheGroupKind.LATENT)
STATE = GroupDescriptor(CacheGroupKind.STATE)


def sliding(window: int) -> GroupDescriptor:
    return GroupDescriptor(CacheGroupKind.SLIDING, window)


groups = st.one_of(st.sampled_from([FULL, LATENT, STATE]), st.integers(1, 40).map(sliding))


def is_accepted(group: GroupDescriptor, present: list[bool], columns: int, page_size: int) -> bool:
    """Look at each earlier token that the token at the position ``columns * page_size`` sees."""
    length = columns * page_size
    if group.kind is CacheGroupKind.STATE:
        return length == 0 or present[columns]
    seen = range(length) if group.window is None else range(max(0, length - group.window + 1), length)
    return all(present[token // page_size] for token in seen)


@given(group=groups, page_size=st.integers(1, 17), data=st.data(), columns=st.integers(0, 12))
def test_lengths_are_accepted_if_every_token_that_is_seen_exists(group, page_size, data, columns):
    entries = columns + (not group.paged)
    present = data.draw(st.lists(st.booleans(), min_size=entries, max_size=entries))
    accepted = acceptable(group, np.array(present, np.bool_), page_size)
    assert accepted.tolist() == [is_accepted(group, present, c, page_size) for c in range(columns + 1)]
    for c in range(columns + 1):
        first = first_needed(group, c * page_size, page_size)
        assert 0 <= first <= c
        if group.paged:
            assert is_accepted(group, [False] * first + [True] * (c - first), c, page_size)
            if first < c:
                hole = [column != first for column in range(c)]
                assert not is_accepted(group, hole, c, page_size), "no token sees the column of first_needed"


@given(kinds=st.lists(groups, min_size=1, max_size=4), page_size=st.integers(1, 17), data=st.data())
def test_the_shortest_group_limits_the_others(kinds, page_size, data):
    columns = data.draw(st.integers(0, 8))
    present = []
    for group in kinds:
        entries = columns + (not group.paged)
        present.append(data.draw(st.lists(st.booleans(), min_size=entries, max_size=entries)))
    length, reached = resumable(kinds, [np.array(have, np.bool_) for have in present], page_size)
    fits = [
        {c * page_size for c in range(columns + 1) if is_accepted(group, have, c, page_size)}
        for group, have in zip(kinds, present, strict=True)
    ]
    assert length == max(set.intersection(*fits))
    assert reached == tuple(map(max, fits))
    assert length <= min(reached)
