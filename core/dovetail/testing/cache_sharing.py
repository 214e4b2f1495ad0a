"""Check ``PrefixCache.shared_prefixes`` by the pages alone, against every possible way to form groups."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np

from dovetail.types import IntArray

Groups = Sequence[tuple[Sequence[int], int]]


def common_tokens(paths: Sequence[IntArray], page_size: int) -> int:
    """Return the number of tokens at the beginning of all ``paths`` (pages ``[groups, n]`` each) that are in the same
    pages."""
    n = min(path.shape[1] for path in paths)
    same = np.all([(path[:, :n] == paths[0][:, :n]).all(axis=0) for path in paths], axis=0)
    return int(np.cumprod(same).sum()) * page_size


def saved(groups: Groups) -> int:
    """Return the number of tokens that need not be read."""
    return sum((len(rows) - 1) * tokens for rows, tokens in groups)


def most_saved(paths: Sequence[IntArray], page_size: int) -> int:
    """Return the most that any grouping saves. Tries all of them, so it is usable for up to about eight paths."""
    common = functools.cache(lambda rows: common_tokens([paths[row] for row in rows], page_size))
    return max(
        sum((len(rows) - 1) * common(tuple(rows)) for rows in partition if len(rows) > 1)
        for partition in partitions(list(range(len(paths))))
    )


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Yield all ways to divide ``items`` into sets."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for partition in partitions(rest):
        yield [[first], *partition]
        for i, chosen in enumerate(partition):
            yield [*partition[:i], [first, *chosen], *partition[i + 1 :]]


def check_groups(groups: Groups, paths: Sequence[IntArray], page_size: int) -> None:
    """Assert that ``groups`` are groups of ``paths``: of two or more paths, no path in two groups, over the same whole
    pages."""
    rows = [row for members, _ in groups for row in members]
    assert len(set(rows)) == len(rows), "a path is in two groups, or twice in one"
    assert set(rows) <= set(range(len(paths))), "a group has an index that belongs to no path"
    for members, tokens in groups:
        assert len(members) > 1, "a group of one shares nothing"
        assert tokens > 0, "a group of no tokens shares nothing"
        assert tokens % page_size == 0, "a group must share whole pages"
        assert tokens <= common_tokens([paths[row] for row in members], page_size), "the pages of a group differ"
