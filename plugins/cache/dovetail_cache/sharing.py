"""Choose which locked paths of a radix tree are worth reading together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dovetail_cache.node import Handle, Node

Gains = np.ndarray[Any, np.dtype[np.int64]]

_NO_GAINS: Gains = np.zeros(1, np.int64)


class Fork:
    """Represent a node at which paths diverge or end. Only at such a node can a group save the most.

    ``rows`` are the rows whose deepest fork this is. ``gains`` and ``ends`` have an entry for the root, for each fork
    above this one, and for this one. ``ends[i]`` is the number of tokens up to node i. ``gains[i]`` is the number of
    reads that are saved below this fork if the rows that form no group at or below it join a group at node i.
    """

    __slots__ = ("above", "ends", "gains", "opened", "rows")

    def __init__(self, above: Fork | None, end: int) -> None:
        self.above = above
        self.rows: list[int] = []
        self.ends: Gains = np.append(above.ends if above else _NO_GAINS, end)
        self.gains: Gains = np.zeros(len(self.ends), np.int64)
        self.opened = 0  # the reads saved if there is a group here


def shared_prefixes(handles: Sequence[Handle]) -> list[tuple[list[int], int]]:
    """Compute ``PrefixCache.shared_prefixes``.

    A group at a node costs one read of its tokens and saves as many tokens for each row that joins. A row joins the
    deepest group on its path. The best set of groups is found from the leaves up, for every possible group above that
    takes the remaining rows: O(rows * depth) numbers, with one numpy operation for each fork.
    """
    rows: dict[Node, list[int]] = {}
    for index, handle in enumerate(handles):
        if handle.length:
            assert handle.node is not None
            assert handle.node.end == handle.length, "shared_prefixes needs handles that are locked"
            node = handle.node
            while node.locks == 1 and node.parent is not None:  # no other path uses this node
                node = node.parent
            if node.parent is not None:
                rows.setdefault(node, []).append(index)
    forks = _forks(rows)
    for fork in reversed(forks):
        _add_up(fork)
    return _chosen(forks)


def _forks(rows: dict[Node, list[int]]) -> list[Fork]:
    """Return the forks of all paths with their rows. Each fork comes after those above it."""
    order, counts = _counted(rows)
    passed = {node.parent for node in order if node.parent is not None and counts[node.parent] == counts[node]}
    forks: list[Fork] = []
    place: dict[Node, Fork | None] = {}
    for node in reversed(order):
        fork = place[node.parent] if node.parent is not None else None
        if node.parent is not None and counts[node] > 1 and node not in passed:
            fork = Fork(fork, node.end)
            forks.append(fork)
        place[node] = fork
        if fork is not None:
            fork.rows += rows.get(node, ())
    return forks


def _counted(rows: dict[Node, list[int]]) -> tuple[list[Node], dict[Node, int]]:
    """Return all nodes on the paths of ``rows``, deepest ends first, and the number of rows that end at or below each
    node."""
    counts: dict[Node, int] = {}
    for node in rows:
        step: Node | None = node
        while step is not None and step not in counts:
            counts[step] = len(rows.get(step, ()))
            step = step.parent
    order = sorted(counts, key=_end, reverse=True)
    for node in order:
        if node.parent is not None:
            counts[node.parent] += counts[node]
    return order, counts


def _end(node: Node) -> int:
    return node.end


def _add_up(fork: Fork) -> None:
    """Decide, for each possible group above, whether a group at this fork saves more, and add the result to the fork
    above."""
    gains = fork.gains + len(fork.rows) * fork.ends
    fork.opened = int(gains[-1] - fork.ends[-1])
    fork.gains = gains[:-1]
    if fork.above is not None:
        fork.above.gains += np.maximum(fork.gains, fork.opened)


def _chosen(forks: list[Fork]) -> list[tuple[list[int], int]]:
    """Return the groups, each of which saves more than no group. Goes from the root down, because each choice depends
    on those above."""
    groups: dict[Fork, list[int]] = {}
    taker: dict[Fork | None, Fork | None] = {None: None}  # the fork whose group the rows of this fork join
    for fork in forks:
        open_above = taker[fork.above]
        column = len(open_above.ends) - 1 if open_above is not None else 0
        taker[fork] = fork if fork.opened > fork.gains[column] else open_above
        joined = taker[fork]
        if joined is not None:
            groups.setdefault(joined, []).extend(fork.rows)
    return [(sorted(rows), int(fork.ends[-1])) for fork, rows in groups.items()]
