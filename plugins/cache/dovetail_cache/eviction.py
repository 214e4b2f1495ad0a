"""Choose which unlocked leaf is evicted first."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Literal

from dovetail_cache.node import Node

Rank = tuple[int, ...]

RANKS: dict[str, Callable[[Node], Rank]] = {
    "lru": lambda node: (node.last_used,),
    "lfu": lambda node: (node.uses, node.last_used),
    "priority": lambda node: (node.priority, node.last_used),
}


def evictable(node: Node) -> bool:
    """Return True for an unlocked leaf of the tree."""
    return not node.locks and not node.children and node.parent is not None


class EvictionQueue:
    """Order leaves in a heap, which is updated only when something is evicted.

    The rank of a node only rises, so an entry may be too early but never too late. When an entry comes up, it is pushed
    again with the current rank, or dropped if the node is no longer an unlocked leaf. Each node has at most one entry.
    One eviction therefore costs O(log nodes) plus the entries that have changed since the last one.
    """

    def __init__(self, eviction: Literal["lru", "lfu", "priority"]) -> None:
        self.rank = RANKS[eviction]
        self._heap: list[tuple[Rank, int, Node]] = []
        self._tie = itertools.count()
        self._forgotten = 0  # entries of nodes that are no longer in the tree

    def __len__(self) -> int:
        return len(self._heap) - self._forgotten

    def forget(self, node: Node) -> None:
        """Remove the entry of a node that leaves the tree without having been popped."""
        if not node.queued:
            return
        node.queued = False
        self._forgotten += 1
        if 2 * self._forgotten > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[-1].queued]
            heapq.heapify(self._heap)
            self._forgotten = 0

    def push(self, node: Node) -> None:
        """Add ``node`` if it is an unlocked leaf. Must be called whenever ``node`` may have become one."""
        if not node.queued and evictable(node):
            node.queued = True
            heapq.heappush(self._heap, (self.rank(node), next(self._tie), node))

    def pop(self) -> Node | None:
        """Remove and return the unlocked leaf of the lowest rank; return None if there is none."""
        while self._heap:
            rank, _, node = heapq.heappop(self._heap)
            if not node.queued:
                self._forgotten -= 1
                continue
            node.queued = False
            if not evictable(node):
                continue
            if self.rank(node) == rank:
                return node
            self.push(node)
        return None
