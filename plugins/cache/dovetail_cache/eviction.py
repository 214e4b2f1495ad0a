"""Which unlocked leaf is forgotten first."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Literal

from dovetail_cache.node import Node

Rank = tuple[int, ...]

_RANKS: dict[str, Callable[[Node], Rank]] = {
    "lru": lambda node: (node.last_used,),
    "lfu": lambda node: (node.uses, node.last_used),
    "priority": lambda node: (node.priority, node.last_used),
}


def evictable(node: Node) -> bool:
    """True for an unlocked leaf of the tree."""
    return not node.locks and not node.children and node.parent is not None


class EvictionQueue:
    """A heap of leaves, put in order only when something is evicted.

    A node's rank only rises, so an entry is at worst too early: when it comes up, it is pushed back with the rank of
    now, or dropped if the node is no unlocked leaf any more. Each node has at most one entry, hence one eviction costs
    O(log nodes) plus what was touched since the last one.
    """

    def __init__(self, eviction: Literal["lru", "lfu", "priority"]) -> None:
        self._rank = _RANKS[eviction]
        self._heap: list[tuple[Rank, int, Node]] = []
        self._tie = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, node: Node) -> None:
        """Call whenever ``node`` may have become an unlocked leaf."""
        if not node.queued and evictable(node):
            node.queued = True
            heapq.heappush(self._heap, (self._rank(node), next(self._tie), node))

    def pop(self) -> Node | None:
        """Take out the unlocked leaf of lowest rank; None if there is none."""
        while self._heap:
            rank, _, node = heapq.heappop(self._heap)
            node.queued = False
            if not evictable(node):
                continue
            if self._rank(node) == rank:
                return node
            self.push(node)
        return None
